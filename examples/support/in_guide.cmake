# SPDX-License-Identifier: BSD-3-Clause
# cmake -P in_guide.cmake -- PROGRAM: must end with exit code 0, and guide/porting.md must have each line of its
# output that does not begin with a space.
include(${CMAKE_CURRENT_LIST_DIR}/program_arguments.cmake)
program_arguments(command)
execute_process(COMMAND ${command} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
message("${output}")
file(READ ${CMAKE_CURRENT_LIST_DIR}/../guide/porting.md page)
string(REGEX MATCHALL "\n[^ \n][^\n]*" lines "\n${output}")
if(NOT lines)
  message(FATAL_ERROR "no output")
endif()
foreach(line IN LISTS lines)
  string(STRIP "${line}" line)
  string(FIND "${page}" "${line}" found)
  if(found EQUAL -1)
    message(SEND_ERROR "guide/porting.md lacks: ${line}")
  endif()
endforeach()
