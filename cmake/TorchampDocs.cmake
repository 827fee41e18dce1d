# SPDX-License-Identifier: BSD-3-Clause
# torchamp_add_docs(): the target `docs`, which writes build/…/docs/html with Doxygen. Any static host can serve this
# folder. It has README as the front page, the gallery, the guide, and a page for each public header, in the order
# below, with a search. A public name that is not documented is an error. Only this target needs Doxygen. If Doxygen is
# missing, the target reports this.

include(${CMAKE_CURRENT_LIST_DIR}/TorchampMarkdown.cmake)

# The Markdown pages, in order; other pages of the guide follow.
set(_torchamp_docs_guide
    install training-step guards caches scaler optimizers cuda-graphs porting custom-ops faster-models recipes troubleshooting mistakes diagnosis
    audit policies fp8 memory processes checkpoints labs measured contributors)

# The headers' pages, in order.
set(_torchamp_docs_headers
    torchamp
    # The training loop
    training_step training_result training_log
    autocast autocast_state cast_cache cpu_products weight_cache policy policy_text ops rule
    grad_scaler grad_scaler_options closure_step missing_gradients
    accumulate optim muon_options split_for_muon lr_scheduler scaled_step clip_grad cuda_graph
    # Models
    custom_function recompute master_weights
    # Diagnosis
    overflow_report non_finite_op
    # Files and processes
    training_checkpoint python_state distributed/process_group distributed/nccl distributed/data_parallel
    distributed/sharded_masters distributed/training_group distributed/checkpoint compiled version
    # Labs
    labs/fp8 labs/fp8_options labs/precision_audit labs/audit_row labs/policy_file labs/module_policy labs/cast_recorder
    labs/underflow_meter labs/weights_together)

# Sets `page` to the name of the page that the Markdown file `file`, relative to the source tree, becomes.
function(_torchamp_docs_name page file)
  set(README.md index)
  set(examples/README.md gallery)
  set(tests/cuda_on_host/README.md cuda-on-host)
  if(${file})
    set(name ${${file}})
  else()
    cmake_path(GET file STEM name)
    string(TOLOWER ${name} name)
  endif()
  set(${page} ${name} PARENT_SCOPE)
endfunction()

# Writes `file`, one of `pages`, for Doxygen. The anchor of a heading is the page's name, then GitHub's anchor. The
# anchor of a page is its name. Links to pages and headers become references. Other links become relative to the top
# folder.
function(_torchamp_docs_page file to pages)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${file})
  torchamp_markdown_lines(lines ${PROJECT_SOURCE_DIR}/${file})
  _torchamp_docs_name(name ${file})
  cmake_path(GET file PARENT_PATH folder)
  set(result "")
  set(code OFF)
  foreach(line IN LISTS lines)
    if(line MATCHES "^```")
      if(code)
        set(code OFF)
      else()
        set(code ON)
      endif()
      string(REPLACE " run" "" line "${line}")
    elseif(NOT code)
      torchamp_markdown_anchor(anchor "${line}")
      if(line MATCHES "^# " AND NOT name STREQUAL "index")
        string(APPEND line " {#${name}}")
      elseif(line MATCHES "^##")
        string(APPEND line " {#${name}-${anchor}}")
      endif()
      string(REGEX MATCHALL "@CLOSE@[(][A-Za-z0-9_./#-]+[)]" links "${line}")
      foreach(link IN LISTS links)
        string(REGEX REPLACE "@CLOSE@[(]([^#]*)(#.*)?[)]$" "\\1" path "${link}")
        string(REGEX REPLACE "@CLOSE@[(][^#]*#?(.*)[)]$" "\\1" anchor "${link}")
        set(target ${file})
        if(path)
          set(target ${folder}/${path})
          string(REGEX REPLACE "^/" "" target "${target}")
          cmake_path(NORMAL_PATH target)
        endif()
        if(target IN_LIST pages)
          _torchamp_docs_name(page ${target})
          if(anchor)
            set(new "@CLOSE@(#${page}-${anchor})")
          else()
            set(new "@CLOSE@(@ref ${page})")
          endif()
        elseif(target MATCHES "^include/(torchamp/(distributed/)?[^/]+[.]h)$")
          set(new "@CLOSE@(@ref ${CMAKE_MATCH_1})")
        else()
          set(new "@CLOSE@(${target})")
        endif()
        string(REPLACE "${link}" "${new}" line "${line}")
      endforeach()
    endif()
    string(APPEND result "${line}\n")
  endforeach()
  # Doxygen treats other Markdown files as separate pages.
  string(REGEX REPLACE "@OPEN@([^@]+)@CLOSE@[(]([^:)#]+[.]md)[)]" "<a href=\"\\2\">\\1</a>" result "${result}")
  torchamp_markdown_text(result "${result}")
  file(WRITE ${to} "${result}")
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
  file(GLOB guide CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/examples/guide/*.md)
  list(TRANSFORM _torchamp_docs_guide REPLACE "(.+)" "examples/guide/\\1.md" OUTPUT_VARIABLE ordered)
  set(files README.md examples/README.md ${ordered} ${guide} .github/CHANGELOG.md .github/CONTRIBUTING.md
            tests/cuda_on_host/README.md)
  list(REMOVE_DUPLICATES files)
  set(pages "")
  foreach(file IN LISTS files)
    _torchamp_docs_name(name ${file})
    _torchamp_docs_page(${file} ${folder}/pages/${name}.md "${files}")
    list(APPEND pages ${folder}/pages/${name}.md)
  endforeach()

  # The list of headers, each with the line that states its purpose.
  set(index "# Headers {#headers}\n\n| header | what it is for |\n|---|---|\n")
  set(inputs "")
  get_target_property(public torchamp HEADER_SET)
  list(FILTER public EXCLUDE REGEX "/detail/")
  list(TRANSFORM public REPLACE "^.*include/torchamp/(.*)[.]h$" "\\1")
  list(APPEND _torchamp_docs_headers ${public})
  list(REMOVE_DUPLICATES _torchamp_docs_headers)
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

  set(DOXYGEN_USE_MDFILE_AS_MAINPAGE ${folder}/pages/index.md)
  set(DOXYGEN_STRIP_FROM_PATH ${PROJECT_SOURCE_DIR}/include ${folder}/pages)
  set(DOXYGEN_STRIP_FROM_INC_PATH ${PROJECT_SOURCE_DIR}/include)
  set(DOXYGEN_IMAGE_PATH ${PROJECT_SOURCE_DIR}/examples/benchmark/results)
  set(DOXYGEN_OUTPUT_DIRECTORY ${folder})
  set(DOXYGEN_EXCLUDE_SYMBOLS detail detail::* torchamp::detail torchamp::detail::*)
  # One namespace, whatever the version: see version.h.
  set(DOXYGEN_MACRO_EXPANSION YES)
  set(DOXYGEN_EXPAND_ONLY_PREDEF YES)
  set(DOXYGEN_PREDEFINED TORCHAMP_NAMESPACE=torchamp "TORCH_ARG(T,name)=T name")
  set(DOXYGEN_HAVE_DOT NO)
  set(DOXYGEN_GENERATE_LATEX NO)
  set(DOXYGEN_GENERATE_TREEVIEW YES)
  set(DOXYGEN_SEARCHENGINE YES)
  set(DOXYGEN_SERVER_BASED_SEARCH NO)  # the browser searches
  set(DOXYGEN_QUIET YES)
  set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
  set(DOXYGEN_JAVADOC_AUTOBRIEF YES)  # the first sentence is the brief description
  set(DOXYGEN_SORT_MEMBER_DOCS NO)
  set(DOXYGEN_INLINE_SIMPLE_STRUCTS YES)
  set(DOXYGEN_MAX_INITIALIZER_LINES 0)
  set(DOXYGEN_SOURCE_BROWSER YES)  # each name links to its line
  set(DOXYGEN_STRIP_CODE_COMMENTS NO)
  set(DOXYGEN_REFERENCES_LINK_SOURCE NO)
  set(DOXYGEN_HIDE_FRIEND_COMPOUNDS YES)
  set(DOXYGEN_SHOW_INCLUDE_FILES NO)
  set(DOXYGEN_HTML_EXTRA_STYLESHEET ${PROJECT_SOURCE_DIR}/cmake/docs.css)
  set(DOXYGEN_INPUT_FILTER "sed -E 's/^.*= (delete|default).$//'")  # needs no comment
  list(POP_FRONT pages front gallery)
  doxygen_add_docs(docs ${front} ${folder}/pages/headers.md ${gallery} ${pages} ${inputs}
                   COMMENT "The reference: ${folder}/html/index.html")
  add_custom_command(
    TARGET docs POST_BUILD COMMAND ${CMAKE_COMMAND} -E copy_directory ${PROJECT_SOURCE_DIR}/examples
                                   ${folder}/html/examples VERBATIM)
endfunction()
