# SPDX-License-Identifier: BSD-3-Clause
# Empties the folder OUT, and runs `command`, a comparison, with OUT as its output. If it fails, prints the workers'
# output.
file(REMOVE_RECURSE "${OUT}")
execute_process(COMMAND ${command} --out "${OUT}" RESULT_VARIABLE code)
if(NOT code STREQUAL "0")
  if(EXISTS "${OUT}/workers.log")
    file(READ "${OUT}/workers.log" log)
    message("${log}")
  endif()
  message(FATAL_ERROR "The exit code is ${code}.")
endif()

# Fails unless the file NAME in OUT is a PNG file.
function(expect_png name)
  file(READ "${OUT}/${name}" signature LIMIT 8 HEX)
  if(NOT signature STREQUAL "89504e470d0a1a0a")
    message(FATAL_ERROR "${name} is no PNG file.")
  endif()
endfunction()
