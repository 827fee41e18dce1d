# SPDX-License-Identifier: BSD-3-Clause
# torchamp_add_compiled(): the targets that compile torchamp once, by compiled.cpp next to this file. See "Compiled
# once" in .github/CONTRIBUTING.md. torchamp's own build calls this, and projects that find the package.
#
#   torchamp::library   a static library, built once in a project if a target links it
#   torchamp::compiled  compiled.cpp as a source of each target that links it, with that target's flags
#
# Both are imported targets. So if a package's targets link them, the package's export names them.

set(_torchamp_compiled ${CMAKE_CURRENT_LIST_DIR}/compiled.cpp)

function(torchamp_add_compiled)
  if(TARGET torchamp::compiled)
    return()
  endif()
  add_library(torchamp::compiled INTERFACE IMPORTED GLOBAL)
  target_link_libraries(torchamp::compiled INTERFACE torchamp::torchamp)
  target_compile_definitions(torchamp::compiled INTERFACE TORCHAMP_COMPILED)
  target_sources(torchamp::compiled INTERFACE ${_torchamp_compiled})

  add_library(torchamp_library STATIC EXCLUDE_FROM_ALL ${_torchamp_compiled})
  target_link_libraries(torchamp_library PUBLIC torchamp::torchamp)
  target_compile_definitions(torchamp_library PUBLIC TORCHAMP_COMPILED)
  # Shared libraries also link it. Nobody replaces its functions, so GCC may inline them.
  set_target_properties(torchamp_library PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_options(torchamp_library PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fno-semantic-interposition>)
  add_library(torchamp::library INTERFACE IMPORTED GLOBAL)
  target_link_libraries(torchamp::library INTERFACE torchamp_library)

  cmake_language(EVAL CODE "cmake_language(DEFER DIRECTORY [[${CMAKE_SOURCE_DIR}]]
    CALL _torchamp_keep_apart [[${_torchamp_compiled}]] [[${CMAKE_SOURCE_DIR}]])")
endfunction()

# Excludes `source` from precompiled headers and unity builds in `folder` and below. Otherwise definitions of a target's
# other sources would reach it. A property of a source file applies in one folder. So at its end, the project sets it in
# all of its folders.
function(_torchamp_keep_apart source folder)
  set_source_files_properties(
    ${source} DIRECTORY ${folder} PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(below IN LISTS folders)
    _torchamp_keep_apart(${source} ${below})
  endforeach()
endfunction()
