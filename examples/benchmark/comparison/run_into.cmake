# SPDX-License-Identifier: BSD-3-Clause
# Runs `command`, a comparison, into the folder OUT, which is emptied first. Ends with what its workers wrote if it fails.
file(REMOVE_RECURSE "${OUT}")
execute_process(COMMAND ${command} --out "${OUT}" RESULT_VARIABLE code)
if(NOT code STREQUAL "0")
  if(EXISTS "${OUT}/workers.log")
    file(READ "${OUT}/workers.log" log)
    message("${log}")
  endif()
  message(FATAL_ERROR "The exit code is ${code}.")
endif()
