# SPDX-License-Identifier: BSD-3-Clause
# cmake -DOUT=folder -DREPORT=report.md -P again.cmake -- program [argument…]
# Runs `comparison --from …` and checks its files: the charts, and the same chapter on training as in REPORT.
include(${CMAKE_CURRENT_LIST_DIR}/../../support/program_arguments.cmake)
program_arguments(command)
include(${CMAKE_CURRENT_LIST_DIR}/run_into.cmake)
foreach(chart IN ITEMS time.png memory.png ratio.png)
  expect_png(${chart})
endforeach()
file(READ "${OUT}/report.md" again)
file(READ "${REPORT}" report)
string(FIND "${report}" "${again}" at)
if(NOT at EQUAL 0)
  message(FATAL_ERROR "${REPORT} does not begin with what is written from its raw numbers:\n${again}")
endif()
