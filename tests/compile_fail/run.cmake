# SPDX-License-Identifier: BSD-3-Clause
# Compiles FILE. This must fail with the message that the line "// error: REGEX" of FILE names.
#
#   cmake -DFILE=PATH -DCOMPILE=COMMAND… -P run.cmake

file(STRINGS ${FILE} expected REGEX "^// error: ")
string(REGEX REPLACE "^// error: " "" expected "${expected}")
execute_process(COMMAND ${COMPILE} ${FILE} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(status EQUAL 0)
  message(FATAL_ERROR "COMPILED: ${FILE}")
endif()
if(expected STREQUAL "" OR NOT output MATCHES "${expected}")
  message(FATAL_ERROR "OTHER MESSAGE than \"${expected}\":\n${output}")
endif()
