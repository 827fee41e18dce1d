# SPDX-License-Identifier: BSD-3-Clause
# torchamp_add_readme_test(FILE…): every code block of these Markdown files is compiled or configured.
#
#   ```cpp   with an int main: a program of its own, built and run; without: the body of a
#            function that sees the names of readme/prelude.h, its #include lines apart. All of
#            these in one file, compiled. Those with distributed/process_group.h need Gloo's headers.
#   ```cmake a project with a main.cpp, configured against this source tree.
#   ```sh    its `--preset NAME`s must exist in CMakePresets.json.
#
# The files and sections that they link to must exist.

include(${CMAKE_CURRENT_LIST_DIR}/TorchampMarkdown.cmake)

# Sets `blocks` to the numbers of the first lines of the blocks of `file` in `language`, and block_LINE to their texts.
macro(_torchamp_readme_blocks blocks file language)
  torchamp_markdown_lines(readme ${file})
  set(${blocks} "")
  set(inside "")
  set(number 0)
  foreach(line IN LISTS readme)
    math(EXPR number "${number} + 1")
    if(inside STREQUAL "" AND line MATCHES "^```([a-z]*) *$")
      set(inside "other")
      if(CMAKE_MATCH_1 STREQUAL "${language}")
        math(EXPR inside "${number} + 1")
        list(APPEND ${blocks} ${inside})
        set(block_${inside} "")
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

# Sets `name` to what tests of the blocks of `file` begin with: readme, examples_readme.
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
  set(includes "")
  set(bodies "")
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
        add_test(NAME ${target} COMMAND ${target})
        set_tests_properties(${target} PROPERTIES LABELS readme)
      else()
        string(REGEX MATCHALL "#include [^\n]*\n" own "${text}")
        string(JOIN "" own ${own})
        string(APPEND includes "${own}")
        string(REGEX REPLACE "#include [^\n]*\n" "\n" text "${text}")
        string(APPEND bodies "\nvoid ${name}_line_${line}() {\n#line ${line} \"${file}\"\n${text}}\n")
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
        string(REGEX MATCHALL "--preset[ =]([a-z-]+)" used "${block_${line}}")
        foreach(preset IN LISTS used)
          string(REGEX REPLACE "--preset[ =]" "" preset ${preset})
          if(NOT presets MATCHES "\"name\": \"${preset}\"")
            message(FATAL_ERROR "${file}:${line}: there is no preset \"${preset}\"")
          endif()
        endforeach()
      endforeach()
    endforeach()
  endforeach()

  if(bodies)
    file(CONFIGURE OUTPUT ${folder}/bodies.cpp @ONLY
         CONTENT "#include \"readme/prelude.h\"\n@includes@\nnamespace readme {\n@bodies@\n}  // namespace readme\n")
    add_library(readme_bodies OBJECT ${folder}/bodies.cpp)
    target_link_libraries(readme_bodies PRIVATE torchamp_test_support)
    target_precompile_headers(readme_bodies REUSE_FROM torchamp_test_support)
    torchamp_warnings(readme_bodies)
    target_compile_options(readme_bodies PRIVATE -Wno-unused -Wno-shadow)
  endif()
endfunction()
