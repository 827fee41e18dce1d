# SPDX-License-Identifier: BSD-3-Clause
# find_package(torchamp): the targets torchamp::torchamp, torchamp::library and torchamp::compiled, over torchamp::libtorch,
# the LibTorch that TorchampLibTorch.cmake finds, or fetches where the package is REQUIRED. Targets of the project that
# know nothing of torchamp link it as TORCH_LIBRARIES, as after find_package(Torch).

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
include(${CMAKE_CURRENT_LIST_DIR}/TorchampCompiled.cmake)
torchamp_add_compiled()
if(NOT TORCH_LIBRARIES)
  set(TORCH_LIBRARIES torchamp::libtorch)
endif()
