# SPDX-License-Identifier: BSD-3-Clause
# What tests/CMakeLists.txt is written with.

# ---- GoogleTest: the sources that the user names, or installed, or Debian's sources ---------------

function(torchamp_find_googletest)
  set(TORCHAMP_GTEST_SOURCE "" CACHE PATH "A GoogleTest source tree to build instead of finding one")
  if(NOT TORCHAMP_GTEST_SOURCE)
    find_package(GTest QUIET)
    if(TARGET GTest::gmock_main)
      return()
    endif()
    find_path(source googletest/CMakeLists.txt PATHS /usr/src/googletest NO_CACHE)
  else()
    set(source ${TORCHAMP_GTEST_SOURCE})
  endif()
  if(NOT EXISTS ${source}/googlemock/CMakeLists.txt)
    message(
      FATAL_ERROR
        "torchamp's tests need GoogleTest. Install it (apt install libgtest-dev libgmock-dev), name a "
        "source tree of it with -DTORCHAMP_GTEST_SOURCE=DIR, or configure with -DTORCHAMP_BUILD_TESTS=OFF.")
  endif()
  set(INSTALL_GTEST OFF)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
  add_subdirectory(${source} ${CMAKE_CURRENT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL SYSTEM)
endfunction()

# ---- Tests ----------------------------------------------------------------------------------------

# What every test binary shares: the precompiled <torch/torch.h> and GoogleTest, and an object file
# that includes the umbrella header alone, so that each test is also a check of the one-definition rule.
function(torchamp_test_support)
  add_library(torchamp_test_support OBJECT support/umbrella.cpp)
  target_link_libraries(torchamp_test_support PUBLIC torchamp::torchamp GTest::gmock_main)
  target_include_directories(torchamp_test_support PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_precompile_headers(torchamp_test_support PRIVATE <torch/torch.h> <gmock/gmock.h> <gtest/gtest.h>)
  torchamp_warnings(torchamp_test_support)
endfunction()

# torchamp_add_test(NAME [LINKS target…] [LABELS label…]): builds NAME_test.cpp and runs it.
function(torchamp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINKS;LABELS")
  add_executable(${name}_test ${name}_test.cpp)
  target_link_libraries(${name}_test PRIVATE torchamp_test_support ${arg_LINKS})
  target_precompile_headers(${name}_test REUSE_FROM torchamp_test_support)
  torchamp_warnings(${name}_test)
  add_test(NAME ${name} COMMAND ${name}_test)
  set_tests_properties(${name} PROPERTIES LABELS "unit;${arg_LABELS}")
  if(TORCHAMP_REQUIRE_CUDA)  # the reason that tests/support/devices.h gives
    set_tests_properties(${name} PROPERTIES FAIL_REGULAR_EXPRESSION "sees no CUDA device")
  endif()
endfunction()
