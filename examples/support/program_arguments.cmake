# SPDX-License-Identifier: BSD-3-Clause
# For scripts that are run as `cmake … -P SCRIPT -- program [argument…]`: program_arguments(VARIABLE) sets the variable
# to the arguments after the first `--`.
function(program_arguments result)
  set(arguments)
  math(EXPR last "${CMAKE_ARGC} - 1")
  foreach(i RANGE ${last})
    if(DEFINED seen)
      list(APPEND arguments "${CMAKE_ARGV${i}}")
    elseif(CMAKE_ARGV${i} STREQUAL "--")
      set(seen TRUE)
    endif()
  endforeach()
  set(${result} "${arguments}" PARENT_SCOPE)
endfunction()
