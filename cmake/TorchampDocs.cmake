# SPDX-License-Identifier: BSD-3-Clause
# torchamp_add_docs(): the target `docs`, which makes build/…/docs/html with Doxygen: README as the front page, the
# gallery, and a page for each public header, in the order below. A public name that is not documented is an error.
# Nothing else needs Doxygen: where it is missing, the target says so.

# The pages, in order.
set(_torchamp_docs_headers
    torchamp
    # The training loop
    training_step training_result training_log
    autocast autocast_state weight_cache policy fp8 policy_text policy_file ops grad_scaler grad_scaler_options
    step_result missing_gradients
    accumulate accumulation safe_accumulation optim scaled_step clip_grad cuda_graph
    # Models
    custom_function module_policy recompute host_memory master_weights
    # To look at
    cast_recorder precision_audit audit_row overflow_report non_finite_op underflow_meter
    # Files and processes
    training_checkpoint python_state distributed/process_group distributed/nccl distributed/data_parallel
    distributed/sharded_masters distributed/training_group distributed/checkpoint compiled version)

# Public names that a public header takes from detail/.
set(_torchamp_docs_parts include/torchamp/detail/policy/rule.h)

# Writes `file`, a Markdown file of the source tree, to `to` as Doxygen wants it: headings with the anchors that GitHub
# gives them, links relative to the top folder.
function(_torchamp_docs_page file to)
  file(READ ${PROJECT_SOURCE_DIR}/${file} text)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${file})
  string(REGEX MATCHALL "(^|\n)#+ [^\n]+" headings "${text}")
  foreach(heading IN LISTS headings)
    string(REGEX REPLACE "^\n?#+ " "" anchor "${heading}")
    string(TOLOWER "${anchor}" anchor)
    string(REGEX REPLACE "[^a-z0-9 _-]" "" anchor "${anchor}")
    string(REPLACE " " "-" anchor "${anchor}")
    string(REPLACE "${heading}\n" "${heading} {#${anchor}}\n" text "${text}")
  endforeach()
  cmake_path(GET file PARENT_PATH folder)
  if(folder)
    string(REGEX REPLACE "\\]\\(([^#:)]+)\\)" "](${folder}/\\1)" text "${text}")
    string(REGEX REPLACE "\\]\\([^:)]+/\\.\\./([^)]+)\\)" "](\\1)" text "${text}")
  endif()
  # Links between the pages.
  string(REGEX REPLACE "\\]\\([^:)#]*(README|install|policy|mistakes|CHANGELOG)[.]md#([^)]+)\\)" "](#\\2)" text "${text}")
  string(REPLACE "](examples/install.md)" "](@ref install)" text "${text}")
  string(REPLACE "](examples/policy.md)" "](@ref the-default-policy)" text "${text}")
  string(REPLACE "](examples/mistakes.md)" "](@ref mistakes-and-limits)" text "${text}")
  string(REPLACE "](.github/CHANGELOG.md)" "](@ref changes)" text "${text}")
  string(REPLACE "](examples/README.md)" "](@ref gallery)" text "${text}")
  string(REPLACE "](README.md)" "](@ref index)" text "${text}")
  string(REGEX REPLACE "\\]\\(include/(torchamp/[^)]+[.]h)\\)" "](@ref \\1)" text "${text}")
  # Doxygen takes other Markdown files for pages of its own.
  string(REGEX REPLACE "\\[([^]]+)\\]\\(([^:)#]+[.]md)\\)" "<a href=\"\\2\">\\1</a>" text "${text}")
  file(WRITE ${to} "${text}")
endfunction()

function(torchamp_add_docs)
  find_package(Doxygen QUIET)
  if(NOT DOXYGEN_FOUND)
    add_custom_target(
      docs
      COMMAND ${CMAKE_COMMAND} -E echo "The reference needs Doxygen: apt install doxygen. Then configure again."
      COMMAND ${CMAKE_COMMAND} -E false
      VERBATIM)
    return()
  endif()
  set(folder ${PROJECT_BINARY_DIR}/docs)
  _torchamp_docs_page(README.md ${folder}/pages/README.md)
  _torchamp_docs_page(examples/README.md ${folder}/pages/gallery.md)
  _torchamp_docs_page(examples/policy.md ${folder}/pages/policy.md)
  _torchamp_docs_page(examples/install.md ${folder}/pages/install.md)
  _torchamp_docs_page(examples/mistakes.md ${folder}/pages/mistakes.md)
  _torchamp_docs_page(.github/CHANGELOG.md ${folder}/pages/changes.md)

  # The list of headers, each with the line that says what it is for.
  set(index "# Headers {#headers}\n\n| header | what it is for |\n|---|---|\n")
  set(inputs "")
  get_target_property(public torchamp HEADER_SET)
  list(FILTER public EXCLUDE REGEX "/detail/")
  list(TRANSFORM public REPLACE "^.*include/torchamp/(.*)[.]h$" "\\1")
  list(APPEND _torchamp_docs_headers ${public})
  list(REMOVE_DUPLICATES _torchamp_docs_headers)
  foreach(part IN LISTS _torchamp_docs_parts)
    list(APPEND inputs ${PROJECT_SOURCE_DIR}/${part})
  endforeach()
  foreach(name IN LISTS _torchamp_docs_headers)
    set(header ${PROJECT_SOURCE_DIR}/include/torchamp/${name}.h)
    if(NOT name IN_LIST public)
      message(AUTHOR_WARNING "TorchampDocs.cmake lists ${name}.h, which is no public header")
      continue()
    endif()
    file(STRINGS ${header} brief REGEX "^/// @brief " LIMIT_COUNT 1)
    string(REPLACE "/// @brief " "" brief "${brief}")
    string(APPEND index "| @ref torchamp/${name}.h \"${name}.h\" | ${brief} |\n")
    list(APPEND inputs ${header})
  endforeach()
  file(WRITE ${folder}/pages/headers.md "${index}")

  set(DOXYGEN_USE_MDFILE_AS_MAINPAGE ${folder}/pages/README.md)
  set(DOXYGEN_STRIP_FROM_PATH ${PROJECT_SOURCE_DIR}/include ${folder}/pages)
  set(DOXYGEN_STRIP_FROM_INC_PATH ${PROJECT_SOURCE_DIR}/include)
  set(DOXYGEN_IMAGE_PATH ${PROJECT_SOURCE_DIR}/examples/benchmark/results)
  set(DOXYGEN_OUTPUT_DIRECTORY ${folder})
  set(DOXYGEN_EXCLUDE_SYMBOLS detail detail::* torchamp::detail torchamp::detail::*)
  # One namespace, whatever the version: see version.h.
  set(DOXYGEN_MACRO_EXPANSION YES)
  set(DOXYGEN_EXPAND_ONLY_PREDEF YES)
  set(DOXYGEN_PREDEFINED TORCHAMP_NAMESPACE=torchamp)
  set(DOXYGEN_HAVE_DOT NO)
  set(DOXYGEN_GENERATE_LATEX NO)
  set(DOXYGEN_GENERATE_TREEVIEW YES)
  set(DOXYGEN_QUIET YES)
  set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
  set(DOXYGEN_JAVADOC_AUTOBRIEF YES)  # the first sentence is the brief description
  set(DOXYGEN_SORT_MEMBER_DOCS NO)
  set(DOXYGEN_INLINE_SIMPLE_STRUCTS YES)
  set(DOXYGEN_MAX_INITIALIZER_LINES 0)
  set(DOXYGEN_VERBATIM_HEADERS NO)
  set(DOXYGEN_SHOW_INCLUDE_FILES NO)
  set(DOXYGEN_INPUT_FILTER "sed -E 's/^.*= (delete|default).$//'")  # says all by itself
  doxygen_add_docs(docs ${folder}/pages/README.md ${folder}/pages/headers.md ${folder}/pages/gallery.md
                   ${folder}/pages/policy.md ${folder}/pages/install.md ${folder}/pages/mistakes.md ${folder}/pages/changes.md ${inputs}
                   COMMENT "The reference: ${folder}/html/index.html")
  add_custom_command(
    TARGET docs POST_BUILD COMMAND ${CMAKE_COMMAND} -E copy_directory ${PROJECT_SOURCE_DIR}/examples
                                   ${folder}/html/examples VERBATIM)
endfunction()
