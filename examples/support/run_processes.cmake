# SPDX-License-Identifier: BSD-3-Clause
# cmake -DPROCESSES=2 [-DSECONDS=240] -P run_processes.cmake -- program [argument…]
# Starts PROCESSES copies of the program with the variables of torchrun. Fails unless all end with exit code 0. Ends all
# of them after SECONDS.
if(NOT SECONDS)
  set(SECONDS 240)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/program_arguments.cmake)
program_arguments(program)

string(RANDOM LENGTH 4 ALPHABET 0123456789 port)
set(environment MASTER_ADDR=127.0.0.1 MASTER_PORT=2${port} WORLD_SIZE=${PROCESSES})
# The programs of a pipeline run at the same time. The last program, whose output is printed, is rank 0.
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
