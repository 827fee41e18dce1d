# SPDX-License-Identifier: BSD-3-Clause
# find_package(torchamp COMPONENTS …) defines the targets of these components. Other components are an error.

# Configures a project with these components; `result` is the error, or else the targets.
function(configure result)
  list(JOIN ARGN " " components)
  file(WRITE ${WORK}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(components LANGUAGES CXX)
find_package(torchamp REQUIRED COMPONENTS ${components})
foreach(target libtorch torchamp library compiled)
  if(TARGET torchamp::\${target})
    message(STATUS \"has \${target}\")
  endif()
endforeach()
")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build ${ARGS} "-DCMAKE_PREFIX_PATH=${BUILD};${LIBTORCH}"
    OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(error)
    string(REGEX REPLACE "[ \n]+" " " error "${error}")
    set(${result} "${error}" PARENT_SCOPE)
  else()
    string(REGEX MATCHALL "has [a-z]+" targets "${output}")
    string(REPLACE "has " "" targets "${targets}")
    set(${result} "${targets}" PARENT_SCOPE)
  endif()
endfunction()

function(expect wanted)
  configure(result ${ARGN})
  if(NOT result MATCHES "${wanted}")
    message(SEND_ERROR "components ${ARGN}: got \"${result}\", wanted \"${wanted}\"")
  endif()
endfunction()

expect("^libtorch$" libtorch)
expect("^libtorch;torchamp$" headers)
expect("^libtorch;torchamp;library;compiled$" library OPTIONAL_COMPONENTS unheard_of)
expect("torchamp has no component \"librarry\". Its components are libtorch, headers, library, compiled." librarry)
