# SPDX-License-Identifier: BSD-3-Clause
# cmake -DOUT=folder -P growth_smoke.cmake -- program [argument…]
# Runs `comparison --task growth` and checks its files: a row for each cost with its power, and each number once.
include(${CMAKE_CURRENT_LIST_DIR}/../../support/program_arguments.cmake)
program_arguments(command)
include(${CMAKE_CURRENT_LIST_DIR}/run_into.cmake)

file(READ "${OUT}/report.md" report)
set(number "[0-9.]+(e[-+]?[0-9]+)?")
string(REGEX MATCHALL "\n\\| [a-z][^|]+ \\| ${number} \\|[^|]*\\| ${number} \\|[^|]*\\| -?${number} \\|" rows "${report}")
list(LENGTH rows found)
if(NOT found EQUAL 17)
  message(FATAL_ERROR "report.md has ${found} rows with numbers, not 17:\n${report}")
endif()
file(STRINGS "${OUT}/growth.csv" lines REGEX ",cpp,[0-9]+,[0-9]")
list(LENGTH lines found)
list(REMOVE_DUPLICATES lines)
list(LENGTH lines different)
if(found LESS 34 OR NOT different EQUAL found)
  message(FATAL_ERROR "growth.csv has ${found} lines, ${different} different ones.")
endif()
