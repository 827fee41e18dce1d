# SPDX-License-Identifier: BSD-3-Clause
# cmake -DCODE=2 -DTEXT=regex -P expect_exit.cmake -- program [argument…]
# Fails unless the program ends with the exit code and its error stream matches.
include(${CMAKE_CURRENT_LIST_DIR}/program_arguments.cmake)
program_arguments(command)
execute_process(COMMAND ${command} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE error)
message("${output}${error}")
if(NOT code STREQUAL CODE)
  message(FATAL_ERROR "The exit code is ${code}, not ${CODE}.")
endif()
if(NOT error MATCHES "${TEXT}")
  message(FATAL_ERROR "The error stream does not match \"${TEXT}\".")
endif()
