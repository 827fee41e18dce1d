# SPDX-License-Identifier: BSD-3-Clause
# torchamp_add_readme_test(FILE…): every code block of these Markdown files is compiled or configured.
#
#   ```cpp   with an int main: a separate program, built and run. If the next block is ```text, the program
#            must print it; numbers may differ by a tenth. Without an int main: the body of a function, which
#            may use the names of readme/prelude.h. All bodies are compiled in one file, after their #include
#            lines. Blocks with distributed/process_group.h need Gloo's headers. A program with it runs in two
#            processes. A program with USE_NCCL is also compiled with this macro.
#   ```cpp run: such a body, compiled and run.
#   ```diff  without @@: such a body before and after the change.
#   ```cmake a project with a main.cpp, configured against this source tree.
#   ```sh    its `--preset NAME`s must exist in CMakePresets.json.
#
# The files and sections that they link to must exist. Figures are compared with their sources: see readme/figures.cpp.

include(${CMAKE_CURRENT_LIST_DIR}/TorchampMarkdown.cmake)

# Sets `blocks` to the numbers of the first lines of the blocks of `file` in `language`, and block_LINE to their texts.
# Sets run_LINE to " run" if the block must be run.
macro(_torchamp_readme_blocks blocks file language)
  torchamp_markdown_lines(readme ${file})
  set(${blocks} "")
  set(inside "")
  set(number 0)
  foreach(line IN LISTS readme)
    math(EXPR number "${number} + 1")
    if(inside STREQUAL "" AND line MATCHES "^```([a-z]*)( run)? *$")
      set(inside "other")
      if(CMAKE_MATCH_1 STREQUAL "${language}")
        set(run "${CMAKE_MATCH_2}")
        math(EXPR inside "${number} + 1")
        list(APPEND ${blocks} ${inside})
        set(block_${inside} "")
        set(run_${inside} "${run}")
      endif()
    elseif(line MATCHES "^```")
      set(inside "")
    elseif(inside MATCHES "^[0-9]+$")
      string(APPEND block_${inside} "${line}\n")
    endif()
  endforeach()
  foreach(block IN LISTS ${blocks})
    torchamp_markdown_text(block_${block} "${block_${block}}")
  endforeach()
endmacro()

# Sets `output` to the next block after the block of line `begin` of `file`, if it is a ```text block, or to "".
function(_torchamp_readme_output output file begin)
  torchamp_markdown_lines(lines ${file})
  list(SUBLIST lines ${begin} -1 lines)
  set(found "")
  set(state program)
  foreach(line IN LISTS lines)
    if(state STREQUAL "program" AND line MATCHES "^```")
      set(state between)
    elseif(state STREQUAL "between" AND line MATCHES "^```text")
      set(state output)
    elseif(line MATCHES "^(```|#)" AND NOT state STREQUAL "program")
      break()
    elseif(state STREQUAL "output")
      string(APPEND found "${line}\n")
    endif()
  endforeach()
  torchamp_markdown_text(found "${found}")
  set(${output} "${found}" PARENT_SCOPE)
endfunction()

# Appends the body in the variable `text`, of `line` in `file`, to `KIND_includes` and `KIND_bodies`, as the function `name`.
macro(_torchamp_readme_body kind name file line text)
  set(body "${${text}}")
  string(REGEX MATCHALL "#include [^\n]*\n" own "${body}")
  string(JOIN "" own ${own})
  string(APPEND ${kind}_includes "${own}")
  string(REGEX REPLACE "#include [^\n]*\n" "\n" body "${body}")
  string(APPEND ${kind}_bodies "\nvoid ${name}() {\n#line ${line} \"${file}\"\n${body}}\n")
endmacro()

# A target with the bodies of this kind.
macro(_torchamp_readme_target name)
  target_link_libraries(${name} PRIVATE torchamp_test_support)
  target_precompile_headers(${name} REUSE_FROM torchamp_test_support)
  torchamp_warnings(${name})
  target_compile_options(${name} PRIVATE -Wno-unused -Wno-shadow)
endmacro()

# A program with USE_NCCL: runs on the simulated devices if there are any. Otherwise headers_test compiles it.
function(_torchamp_readme_nccl target source)
  get_target_property(cuda torchamp::libtorch TORCHAMP_CUDA_HEADERS)
  find_path(nccl nccl.h PATHS ${cuda} NO_DEFAULT_PATH NO_CACHE)
  if(NOT nccl)
    return()
  endif()
  if(TORCHAMP_CUDA_ON_HOST)
    target_compile_definitions(${target} PRIVATE USE_NCCL)
    set_property(TEST ${target} APPEND PROPERTY ENVIRONMENT CUDA_ON_HOST_DEVICES=2)
    return()
  endif()
  add_library(${target}_nccl OBJECT EXCLUDE_FROM_ALL ${source})
  target_link_libraries(${target}_nccl PRIVATE torchamp::torchamp)
  target_include_directories(${target}_nccl SYSTEM PRIVATE ${cuda})
  target_compile_definitions(${target}_nccl PRIVATE USE_NCCL)
  torchamp_warnings(${target}_nccl)
  add_dependencies(headers_test ${target}_nccl)
endfunction()

# Sets `name` to the beginning of the names of the tests of `file`: readme, examples_readme.
function(_torchamp_readme_name name file)
  string(TOLOWER "${file}" file)
  string(REGEX REPLACE "[.]md$" "" file "${file}")
  string(MAKE_C_IDENTIFIER "${file}" file)
  set(${name} ${file} PARENT_SCOPE)
endfunction()

function(torchamp_add_readme_test)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/readme)
  find_path(gloo gloo/rendezvous/store.h NO_CACHE)
  get_target_property(libtorch torchamp::libtorch TORCHAMP_PREFIX)
  file(READ ${PROJECT_SOURCE_DIR}/CMakePresets.json presets)
  foreach(kind IN ITEMS compiled run)
    set(${kind}_includes "")
    set(${kind}_bodies "")
  endforeach()
  set(calls "")
  foreach(file IN LISTS ARGN)
    _torchamp_readme_name(name ${file})
    set(file ${PROJECT_SOURCE_DIR}/${file})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})

    # Links
    cmake_path(GET file PARENT_PATH parent)
    file(READ ${file} text)
    string(REPLACE "](" "@LINK@" text "${text}")
    string(REGEX MATCHALL "@LINK@[A-Za-z0-9_./-]*(#[a-z0-9_-]+)?[)]" links "${text}")
    foreach(link IN LISTS links)
      string(REGEX REPLACE "@LINK@|#.*|[)]" "" path "${link}")
      string(REGEX REPLACE "[^#]*#?(.*)[)]" "\\1" anchor "${link}")
      set(target ${file})
      if(path)
        set(target ${parent}/${path})
      endif()
      if(NOT EXISTS ${target})
        message(FATAL_ERROR "${file}: there is no ${path}")
      endif()
      if(anchor AND target MATCHES "[.]md$")
        torchamp_markdown_anchors(anchors ${target})
        if(NOT anchor IN_LIST anchors)
          message(FATAL_ERROR "${file}: there is no section ${path}#${anchor}")
        endif()
      endif()
    endforeach()

    # C++
    _torchamp_readme_blocks(lines ${file} cpp)
    foreach(line IN LISTS lines)
      set(text "${block_${line}}")
      if(NOT gloo AND text MATCHES "torchamp/distributed/process_group[.]h")
        continue()
      endif()
      if(text MATCHES "int main\\(")
        set(target ${name}_line_${line})
        file(CONFIGURE OUTPUT ${folder}/${target}.cpp @ONLY CONTENT "#line ${line} \"${file}\"\n@text@")
        add_executable(${target} ${folder}/${target}.cpp)
        target_link_libraries(${target} PRIVATE torchamp_test_support)
        target_precompile_headers(${target} REUSE_FROM torchamp_test_support)
        torchamp_warnings(${target})
        _torchamp_readme_output(output ${file} ${line})
        file(WRITE ${folder}/${target}.txt "${output}")
        file(MAKE_DIRECTORY ${folder}/${target})
        set(run "")
        if(text MATCHES "torchamp/distributed/process_group[.]h")
          set(run ${CMAKE_COMMAND} -DPROCESSES=2 -P ${PROJECT_SOURCE_DIR}/examples/support/run_processes.cmake --)
        endif()
        add_test(
          NAME ${target}
          COMMAND ${CMAKE_COMMAND} -DEXPECTED=${folder}/${target}.txt -P ${PROJECT_SOURCE_DIR}/tests/readme/prints.cmake
                  -- ${run} $<TARGET_FILE:${target}>
          WORKING_DIRECTORY ${folder}/${target})
        set_tests_properties(${target} PROPERTIES LABELS readme ENVIRONMENT OMP_NUM_THREADS=1)
        if(text MATCHES "USE_NCCL")
          _torchamp_readme_nccl(${target} ${folder}/${target}.cpp)
        endif()
      else()
        set(kind compiled)
        if(run_${line})
          set(kind run)
          string(APPEND calls "  run(\"${name}.md, line ${line}\", &readme::${name}_line_${line});\n")
        endif()
        _torchamp_readme_body(${kind} ${name}_line_${line} ${file} ${line} text)
      endif()
    endforeach()
    _torchamp_readme_blocks(lines ${file} diff)
    foreach(line IN LISTS lines)
      if(NOT block_${line} MATCHES "(^|\n)@@")
        string(REGEX REPLACE "(^|\n)[-][^\n]*" "\\1" after "\n${block_${line}}")
        string(REGEX REPLACE "(^|\n)[+][^\n]*" "\\1" before "\n${block_${line}}")
        string(REGEX REPLACE "\n[ +-]" "\n" after "${after}")
        string(REGEX REPLACE "\n[ +-]" "\n" before "${before}")
        math(EXPR first "${line} - 1")
        _torchamp_readme_body(compiled ${name}_before_${line} ${file} ${first} before)
        _torchamp_readme_body(compiled ${name}_after_${line} ${file} ${first} after)
      endif()
    endforeach()

    # CMake
    _torchamp_readme_blocks(lines ${file} cmake)
    foreach(line IN LISTS lines)
      set(text "${block_${line}}")
      set(project ${folder}/${name}_cmake_${line})
      file(WRITE ${project}/main.cpp "int main() {}\n")
      file(WRITE ${project}/CMakeLists.txt
           "cmake_minimum_required(VERSION 3.25)\nproject(readme LANGUAGES CXX)\n")
      if(NOT text MATCHES "add_executable")
        file(APPEND ${project}/CMakeLists.txt "add_executable(my_program main.cpp)\n")
      endif()
      file(APPEND ${project}/CMakeLists.txt "${text}")
      if(text MATCHES "add_subdirectory\\(([^ )]+)")
        cmake_path(SET link NORMALIZE ${project}/${CMAKE_MATCH_1})
        cmake_path(GET link PARENT_PATH parent)
        file(MAKE_DIRECTORY ${parent})
        file(CREATE_LINK ${PROJECT_SOURCE_DIR} ${link} SYMBOLIC)
      endif()
      add_test(
        NAME ${name}_cmake_line_${line}
        COMMAND
          ${CMAKE_COMMAND} -S ${project} -B ${project}/build --fresh
          -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} -DTORCHAMP_CUDA=${TORCHAMP_CUDA}
          -DFETCHCONTENT_SOURCE_DIR_TORCHAMP=${PROJECT_SOURCE_DIR} -Dtorchamp_DIR=${PROJECT_BINARY_DIR}
          -DCMAKE_PREFIX_PATH=${libtorch})
      set_tests_properties(${name}_cmake_line_${line} PROPERTIES LABELS readme)
    endforeach()

    # Commands
    foreach(language IN ITEMS sh bash console)
      _torchamp_readme_blocks(lines ${file} ${language})
      foreach(line IN LISTS lines)
        string(REGEX MATCHALL "cmake [^\n]*--preset[ =]([a-z-]+)" used "${block_${line}}")
        foreach(preset IN LISTS used)
          string(REGEX REPLACE ".*--preset[ =]" "" preset "${preset}")
          if(NOT presets MATCHES "\"name\": \"${preset}\"")
            message(FATAL_ERROR "${file}:${line}: there is no preset \"${preset}\"")
          endif()
        endforeach()
      endforeach()
    endforeach()
  endforeach()

  # Figures
  add_executable(figures ${PROJECT_SOURCE_DIR}/tests/readme/figures.cpp)
  target_compile_features(figures PRIVATE cxx_std_20)
  torchamp_warnings(figures)
  set(pages ${ARGN})
  list(FILTER pages INCLUDE REGEX "^(README.md|examples/.*)$")
  add_test(NAME figures COMMAND figures ${pages} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set(pages ${PROJECT_SOURCE_DIR}/tests/readme/figures)
  add_test(NAME figures_accept COMMAND figures ${pages}/right.md)
  add_test(NAME figures_refuse COMMAND ${CMAKE_COMMAND} -DPAGES=${pages} -P ${pages}/refuse.cmake -- $<TARGET_FILE:figures>)
  add_test(NAME options_in_guide COMMAND ${CMAKE_COMMAND} -P ${PROJECT_SOURCE_DIR}/tests/readme/options.cmake)
  add_test(NAME gallery COMMAND ${CMAKE_COMMAND} -P ${PROJECT_SOURCE_DIR}/tests/readme/gallery.cmake)
  set_tests_properties(figures figures_accept figures_refuse options_in_guide gallery PROPERTIES LABELS readme)

  file(CONFIGURE OUTPUT ${folder}/bodies.cpp @ONLY CONTENT "#include \"readme/prelude.h\"
@compiled_includes@
namespace readme {
@compiled_bodies@
}  // namespace readme
")
  add_library(readme_bodies OBJECT EXCLUDE_FROM_ALL ${folder}/bodies.cpp)
  _torchamp_readme_target(readme_bodies)
  add_test(NAME readme_bodies COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target readme_bodies --config $<CONFIG>)
  set_tests_properties(readme_bodies PROPERTIES LABELS blocks)
  file(CONFIGURE OUTPUT ${folder}/run.cpp @ONLY CONTENT "#include \"readme/run.h\"
@run_includes@
namespace readme {
@run_bodies@
}  // namespace readme
int main() {
@calls@}
")
  add_executable(readme_run ${folder}/run.cpp)
  _torchamp_readme_target(readme_run)
  add_test(NAME readme_run COMMAND readme_run WORKING_DIRECTORY ${folder})
  set_tests_properties(readme_run PROPERTIES LABELS readme ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()
