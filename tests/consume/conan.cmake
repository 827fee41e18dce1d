# SPDX-License-Identifier: BSD-3-Clause
# Creates the Conan package in a separate cache. Its test package consumes it.

find(conan conan "pip install conan")
set(ENV{CONAN_HOME} ${WORK}/home)
set(ENV{Torch_ROOT} ${LIBTORCH})
set(ENV{CXX} ${CXX})
run(${conan} profile detect)
run(${conan} create ${SOURCE}/cmake/packages/conan --no-remote --build=missing -s compiler.cppstd=20
    --test-folder=${SOURCE}/cmake/packages/conan/test_package -c tools.cmake.cmake_layout:test_folder=${WORK}/test)
