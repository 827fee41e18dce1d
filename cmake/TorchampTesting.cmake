# SPDX-License-Identifier: BSD-3-Clause
# What tests/ is written with: one line a test.
include_guard(GLOBAL)

# The warnings of our own tests and examples; never seen by users.
function(torchamp_warnings target)
  target_compile_options(
    ${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow $<$<BOOL:${TORCHAMP_WERROR}>:-Werror>)
endfunction()

# torchamp_add_test(NAME [LINKS target…] [LABELS label…]): builds NAME_test.cpp against GoogleTest and runs it.
function(torchamp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINKS;LABELS")
  add_executable(${name}_test ${name}_test.cpp)
  target_include_directories(${name}_test PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../tests)
  target_link_libraries(${name}_test PRIVATE torchamp::torchamp GTest::gmock_main ${arg_LINKS})
  torchamp_warnings(${name}_test)
  add_test(NAME ${name} COMMAND ${name}_test)
  set_tests_properties(${name} PROPERTIES LABELS "unit;${arg_LABELS}")
endfunction()
