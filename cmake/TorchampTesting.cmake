# SPDX-License-Identifier: BSD-3-Clause
# The functions that tests/CMakeLists.txt calls.

# ---- GoogleTest: the sources that the user names, an installed one, or Debian's sources -----------

function(torchamp_find_googletest)
  if(TARGET GTest::gmock_main)
    return()
  endif()
  set(TORCHAMP_GTEST_SOURCE "" CACHE PATH "A GoogleTest source tree to build instead of finding one")
  get_target_property(old_abi torchamp::libtorch TORCHAMP_OLD_ABI)
  if(NOT TORCHAMP_GTEST_SOURCE)
    if(NOT old_abi)  # the installed library has today's strings
      find_package(GTest QUIET)
    endif()
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
  if(old_abi)
    add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=0)
  endif()
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
  add_subdirectory(${source} ${CMAKE_CURRENT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL SYSTEM)
endfunction()

# ---- Tests ----------------------------------------------------------------------------------------

# Compiles all files of a target as one, because their includes take longer to compile than the
# files.
option(TORCHAMP_UNITY_TESTS "Compile all files of a test program as one" ON)
function(torchamp_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TORCHAMP_UNITY_TESTS} UNITY_BUILD_BATCH_SIZE 0)
  if(TORCHAMP_UNITY_TESTS AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # without unity, each file is the main file
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# Every test program uses these: the precompiled <torch/torch.h> and GoogleTest, and an object file
# that only includes the umbrella header. So each test also checks the one-definition rule.
function(torchamp_test_support)
  add_library(torchamp_test_support OBJECT support/umbrella.cpp)
  target_link_libraries(torchamp_test_support PUBLIC ${torchamp} GTest::gmock_main)
  target_include_directories(torchamp_test_support PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_precompile_headers(torchamp_test_support PRIVATE <torch/torch.h> <gmock/gmock.h> <gtest/gtest.h>)
  torchamp_warnings(torchamp_test_support)
endfunction()

# The accelerator of tests/simulated_device/device.h. Every test that links it has one accelerator.
function(torchamp_simulated_device)
  file(GLOB sources CONFIGURE_DEPENDS simulated_device/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test[.]cpp$")
  add_library(torchamp_simulated_device OBJECT ${sources})
  target_link_libraries(torchamp_simulated_device PUBLIC torchamp::libtorch GTest::gmock)
  target_include_directories(torchamp_simulated_device PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_features(torchamp_simulated_device PUBLIC cxx_std_20)
  torchamp_warnings(torchamp_simulated_device)
  torchamp_unity(torchamp_simulated_device)
  # For Windows's headers, which define many names.
  set_source_files_properties(simulated_device/pages.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  # LibTorch's macros for autocast kernels
  if(NOT MSVC)
    set_source_files_properties(simulated_device/autocast.cpp PROPERTIES COMPILE_OPTIONS -Wno-pedantic)
  endif()
endfunction()

# torchamp_add_tests(NAME [FILES file…] [FOLDER folder] [INTERNALS file…] [SHARDS n] [IN_ORDER]
#                    [NO_PCH] [SIMULATED] [LINKS target…] [DEFINITIONS NAME=VALUE…]):
# builds folder/file_test.cpp (by default the folder is NAME), and internals/file_test.cpp of the
# INTERNALS, which name torchamp::detail, as the program NAME_test. CTest runs it from this folder
# in n entries (by default 1), which share its tests. IN_ORDER: runs the tests in the order of the
# source, even if GTEST_SHUFFLE is set. NO_PCH: without the precompiled header, for other compiler
# flags. SIMULATED: with the simulated accelerator; if a CUDA device replaces it, in a separate run.
# OpenMP's threads sleep while they wait: tests run at the same time, and a spinning thread would
# take a core from another test. The time limit is for machines that are ten times as slow as ours.
function(torchamp_add_tests name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "IN_ORDER;NO_PCH;SIMULATED" "FOLDER;SHARDS" "FILES;INTERNALS;LINKS;DEFINITIONS")
  if(NOT arg_FOLDER)
    set(arg_FOLDER ${name})
  endif()
  list(TRANSFORM arg_FILES REPLACE "(.+)" "${arg_FOLDER}/\\1_test.cpp" OUTPUT_VARIABLE sources)
  list(TRANSFORM arg_INTERNALS REPLACE "(.+)" "internals/\\1_test.cpp" OUTPUT_VARIABLE internals)
  add_executable(${name}_test ${sources} ${internals})
  target_link_libraries(${name}_test PRIVATE torchamp_test_support ${arg_LINKS})
  target_compile_definitions(${name}_test PRIVATE ${arg_DEFINITIONS})
  if(arg_SIMULATED)
    target_link_libraries(${name}_test PRIVATE torchamp_simulated_device)
  endif()
  if(NOT arg_NO_PCH)
    target_precompile_headers(${name}_test REUSE_FROM torchamp_test_support)
  endif()
  torchamp_unity(${name}_test)
  torchamp_warnings(${name}_test)
  set(shards 1)
  if(arg_SHARDS)
    set(shards ${arg_SHARDS})
  endif()
  foreach(shard RANGE 1 ${shards})
    set(test ${name})
    if(shards GREATER 1)
      set(test ${name}_${shard})
    endif()
    math(EXPR index "${shard} - 1")
    add_test(NAME ${test} COMMAND ${name}_test WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(
      ${test} PROPERTIES LABELS unit TIMEOUT ${TORCHAMP_TEST_TIMEOUT}
                         ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${index};OMP_WAIT_POLICY=passive")
    torchamp_tests_find_libtorch(${test})
    if(arg_IN_ORDER)
      set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT GTEST_SHUFFLE=0)
    endif()
    if(TORCHAMP_REQUIRE_CUDA)  # the reason in tests/support/devices.h
      set_tests_properties(${test} PROPERTIES FAIL_REGULAR_EXPRESSION "sees no CUDA device")
    endif()
  endforeach()
  if(arg_SIMULATED AND TORCHAMP_REQUIRE_CUDA)
    add_test(NAME ${name}_simulated COMMAND ${name}_test --gtest_filter=*Simulated*
             WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(
      ${name}_simulated PROPERTIES LABELS unit TIMEOUT ${TORCHAMP_TEST_TIMEOUT} ENVIRONMENT CUDA_VISIBLE_DEVICES=)
  endif()
endfunction()

# torchamp_add_script_test(NAME SCRIPT [LABELS label…] [ARGS -DVAR=VALUE…]): runs a cmake -P script.
function(torchamp_add_script_test name script)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "LABELS;ARGS")
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} ${arg_ARGS}
                                -P ${CMAKE_CURRENT_SOURCE_DIR}/${script})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}")
endfunction()

# Sets `command` to a command that compiles a file against torchamp without output, and with
# important warnings as errors.
function(torchamp_syntax_command command)
  get_target_property(includes torchamp::libtorch INTERFACE_INCLUDE_DIRECTORIES)
  list(TRANSFORM includes PREPEND -isystem)
  set(${command} ${CMAKE_CXX_COMPILER} -std=c++20 -fsyntax-only -Werror=unused-result -Werror=unused-value
                 -I${PROJECT_SOURCE_DIR}/include ${includes} PARENT_SCOPE)
endfunction()

# torchamp_add_compile_fail_test(NAME): each forbidden use in compile_fail/NAME.cpp must cause the
# error that the file names. For a self check, the test must fail with a text that matches SELF_CHECK.
function(torchamp_add_compile_fail_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SELF_CHECK" "")
  torchamp_syntax_command(command)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")  # by default it stops after 20 errors
    list(APPEND command -ferror-limit=0)
  endif()
  torchamp_add_script_test(
    compile_fail_${name} compile_fail/run.cmake LABELS compile_fail
    ARGS "-DCOMPILE=${command}" -DFILE=${CMAKE_CURRENT_SOURCE_DIR}/compile_fail/${name}.cpp)
  if(arg_SELF_CHECK)
    set_tests_properties(compile_fail_${name} PROPERTIES PASS_REGULAR_EXPRESSION "${arg_SELF_CHECK}")
  endif()
endfunction()

# The target headers_test: every header is compiled alone, included twice in a file. All of these
# files are linked into one program. It takes as long as a third of the tests, so it is built only
# on request.
function(torchamp_add_header_test)
  get_target_property(headers torchamp HEADER_SET)
  set(sources headers/main.cpp)
  set(alone ${headers})
  find_path(gloo gloo/rendezvous/store.h NO_CACHE)
  if(NOT gloo)  # process_group.h has an error for this
    message(STATUS "Gloo's headers not found (apt install libgloo-dev): distributed_test will skip")
    list(FILTER alone EXCLUDE REGEX "/process_group[.]h$")
  endif()
  list(FILTER alone EXCLUDE REGEX "/distributed/nccl[.]h$")  # below
  foreach(header IN LISTS alone)
    cmake_path(RELATIVE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/include)
    string(REGEX REPLACE "[/.]" "_" name ${header})
    set(HEADER ${header})
    configure_file(headers/alone.cpp.in headers/${name}.cpp @ONLY)
    list(APPEND sources ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.cpp)
  endforeach()
  # The target public_headers: all public headers in one file, for a quick check of a LibTorch.
  list(FILTER alone EXCLUDE REGEX "/detail/|/compiled[.]h$")
  list(TRANSFORM alone REPLACE "^${PROJECT_SOURCE_DIR}/include/(.*)$" "#include \"\\1\"\n")
  list(JOIN alone "" includes)
  file(CONFIGURE OUTPUT headers/public_headers.cpp CONTENT "${includes}" @ONLY)
  add_library(public_headers OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/headers/public_headers.cpp)
  target_link_libraries(public_headers PRIVATE torchamp::torchamp)
  torchamp_warnings(public_headers)

  add_executable(headers_test EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(headers_test PRIVATE torchamp::torchamp)
  torchamp_warnings(headers_test)
  target_compile_options(headers_test PRIVATE -Wconversion)
  # Files that need the headers of CUDA and NCCL are compiled if these are found, even for a CPU.
  get_target_property(cuda torchamp::libtorch TORCHAMP_CUDA_HEADERS)
  find_path(nccl nccl.h PATHS ${cuda} NO_DEFAULT_PATH NO_CACHE)
  if(nccl)
    add_library(cuda_headers_test OBJECT EXCLUDE_FROM_ALL headers/cuda.cpp)
    target_link_libraries(cuda_headers_test PRIVATE torchamp::torchamp)
    target_include_directories(cuda_headers_test SYSTEM PRIVATE ${cuda})
    target_compile_options(cuda_headers_test PRIVATE -Wconversion)
    torchamp_warnings(cuda_headers_test)
    add_dependencies(headers_test cuda_headers_test)
  else()
    message(STATUS "Headers of CUDA or NCCL not found: what includes them is not compiled")
  endif()
  torchamp_syntax_command(command)
  torchamp_add_script_test(headers_light headers/run.cmake LABELS headers
                           ARGS "-DCOMPILE=${command}" -DNM=${CMAKE_NM}
                                -DBUILD=${CMAKE_CURRENT_BINARY_DIR}/headers)
endfunction()

# torchamp_add_consume_test(HOW): the same small program, which gets torchamp in the way HOW.
function(torchamp_add_consume_test how)
  get_target_property(prefix torchamp::libtorch TORCHAMP_PREFIX)
  set(args -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} -DCMAKE_CXX_FLAGS=${CMAKE_CXX_FLAGS}
           -DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE} -DTORCHAMP_CUDA=${TORCHAMP_CUDA} -G${CMAKE_GENERATOR})
  # Flags that a compiler without CMake needs for this LibTorch: the ABI of its strings, and
  # libraries that it does not find.
  get_target_property(link torchamp::libtorch INTERFACE_LINK_LIBRARIES)
  list(FILTER link INCLUDE REGEX "^/")
  set(link_flags -Wl,--no-as-needed ${link})
  foreach(library IN LISTS link)
    cmake_path(GET library PARENT_PATH folder)
    list(APPEND link_flags -Wl,-rpath,${folder})
  endforeach()
  get_target_property(old_abi torchamp::libtorch TORCHAMP_OLD_ABI)
  separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  if(old_abi)
    list(APPEND flags -D_GLIBCXX_USE_CXX11_ABI=0)
  endif()
  torchamp_add_script_test(
    consume_${how} consume/run.cmake LABELS package
    ARGS -DHOW=${how} -DBUILD=${PROJECT_BINARY_DIR} -DLIBTORCH=${prefix} -DCPACK=${CMAKE_CPACK_COMMAND} "-DARGS=${args}"
         -DWORK=${CMAKE_CURRENT_BINARY_DIR}/consume/${how} -DCXX=${CMAKE_CXX_COMPILER}
         "-DCOMPILE=${CMAKE_CXX_COMPILER};${flags}" "-DLINK=${link_flags}")
  set_tests_properties(consume_${how} PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: there is no")
endfunction()
