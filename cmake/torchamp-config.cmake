# SPDX-License-Identifier: BSD-3-Clause
# find_package(torchamp): the targets torchamp::torchamp and torchamp::compiled, over the LibTorch
# that TorchampLibTorch.cmake finds, or fetches where the package is REQUIRED.

include(${CMAKE_CURRENT_LIST_DIR}/TorchampLibTorch.cmake)
if(torchamp_FIND_REQUIRED)
  torchamp_find_libtorch(torchamp_NOT_FOUND_MESSAGE FETCH)
else()
  torchamp_find_libtorch(torchamp_NOT_FOUND_MESSAGE)
endif()
if(torchamp_NOT_FOUND_MESSAGE)
  set(torchamp_FOUND FALSE)
  return()
endif()

if(NOT TARGET torchamp::torchamp)
  include(${CMAKE_CURRENT_LIST_DIR}/torchamp-targets.cmake)
endif()
