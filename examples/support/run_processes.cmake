# SPDX-License-Identifier: BSD-3-Clause
# cmake -DPROCESSES=2 [-DSECONDS=240] -P run_processes.cmake -- program [argument…]
# Starts the program so many times at once, with the variables of torchrun. Fails unless all end with exit code 0, and
# ends them all after so many seconds.
if(NOT SECONDS)
  set(SECONDS 240)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/program_arguments.cmake)
program_arguments(program)

string(RANDOM LENGTH 4 ALPHABET 0123456789 port)
set(environment MASTER_ADDR=127.0.0.1 MASTER_PORT=2${port} WORLD_SIZE=${PROCESSES})
# A pipeline runs at once. Its last program, of which the output is seen, is rank 0.
set(commands)
math(EXPR rank "${PROCESSES} - 1")
while(rank GREATER -1)
  list(APPEND commands COMMAND ${CMAKE_COMMAND} -E env ${environment} RANK=${rank} LOCAL_RANK=${rank} ${program})
  math(EXPR rank "${rank} - 1")
endwhile()
execute_process(${commands} TIMEOUT ${SECONDS} RESULTS_VARIABLE codes)
foreach(code IN LISTS codes)
  if(NOT code STREQUAL 0)
    message(FATAL_ERROR "The exit codes of the processes, the last one's first: ${codes}")
  endif()
endforeach()
