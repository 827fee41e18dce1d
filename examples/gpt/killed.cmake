# SPDX-License-Identifier: BSD-3-Clause
# cmake -DOUT=folder -P killed.cmake -- gpt [option…]
# Trains once to the end. Then trains again, kills the process after its first checkpoint and starts it again. Fails
# unless the files of both models are identical.
include(${CMAKE_CURRENT_LIST_DIR}/../support/program_arguments.cmake)
program_arguments(gpt)
file(REMOVE_RECURSE "${OUT}")
execute_process(COMMAND ${gpt} --out "${OUT}/whole" COMMAND_ERROR_IS_FATAL ANY)
set(kill_when_saved [[
  "$@" &
  while [ ! -e "$0" ]; do
    kill -0 $! || exit 1
    sleep 0.02
  done
  kill -9 $!
  wait $!
]])
execute_process(
  COMMAND sh -c "${kill_when_saved}" "${OUT}/killed/checkpoint.pt" ${gpt} --out "${OUT}/killed" RESULT_VARIABLE code)
if(NOT code EQUAL 137)  # SIGKILL
  message(FATAL_ERROR "The run to be killed ended with exit code ${code}.")
endif()
execute_process(COMMAND ${gpt} --out "${OUT}/killed" OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
message("${output}")
if(NOT output MATCHES "Going on at step [1-9]")
  message(FATAL_ERROR "The second run did not go on.")
endif()
file(SHA256 "${OUT}/whole/model.pt" whole)
file(SHA256 "${OUT}/killed/model.pt" killed)
if(NOT whole STREQUAL killed)
  message(FATAL_ERROR "The models differ.")
endif()
