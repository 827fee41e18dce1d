# SPDX-License-Identifier: BSD-3-Clause
# cmake -DOUT=folder -DROWS=24 -P inference_smoke.cmake -- program [argument…]
# Runs the comparison's inference, which compares the results of the models, and checks its files: a row for each round of
# each way and batch, none of them wrong, and the page.
include(${CMAKE_CURRENT_LIST_DIR}/../../support/program_arguments.cmake)
program_arguments(command)
include(${CMAKE_CURRENT_LIST_DIR}/run_into.cmake)
file(STRINGS "${OUT}/inference.csv" rows)
list(POP_FRONT rows head)
list(LENGTH rows count)
if(NOT count EQUAL ROWS)
  message(FATAL_ERROR "inference.csv has ${count} rows, not ${ROWS}.")
endif()
foreach(row IN LISTS rows)
  if(NOT row MATCHES ",no$")
    message(FATAL_ERROR "A way is wrong: ${row}")
  endif()
endforeach()
file(READ "${OUT}/report.md" report)
foreach(title IN ITEMS "batch 1" "batch 16")
  if(NOT report MATCHES "\n### [^\n]+, ${title}\n.*\n\\| torchamp, casts kept, bf16 \\| [0-9].*\n\\| LibTorch, model cast to bf16, memory kept \\| [0-9]")
    message(FATAL_ERROR "report.md tells nothing of ${title}.")
  endif()
endforeach()
