# SPDX-License-Identifier: BSD-3-Clause
# find_package(torchamp [COMPONENTS …]): the targets torchamp::torchamp, torchamp::library and torchamp::compiled. They
# link torchamp::libtorch, the LibTorch that TorchampLibTorch.cmake finds. If the package is REQUIRED, it also fetches
# LibTorch. The project's targets without torchamp link TORCH_LIBRARIES, as after find_package(Torch).
#
#   libtorch   torchamp::libtorch alone
#   headers    also torchamp::torchamp
#   library    also torchamp::library
#   compiled   also torchamp::compiled
#
# Without COMPONENTS, all of them.

set(_torchamp_components libtorch headers library compiled)
if(NOT torchamp_FIND_COMPONENTS)
  set(torchamp_FIND_COMPONENTS ${_torchamp_components})
endif()
foreach(_torchamp_component IN LISTS torchamp_FIND_COMPONENTS)
  if(_torchamp_component IN_LIST _torchamp_components)
    set(torchamp_${_torchamp_component}_FOUND TRUE)
  elseif(torchamp_FIND_REQUIRED_${_torchamp_component})
    list(JOIN _torchamp_components ", " _torchamp_components)
    set(torchamp_NOT_FOUND_MESSAGE
        "torchamp has no component \"${_torchamp_component}\". Its components are ${_torchamp_components}.")
    set(torchamp_FOUND FALSE)
    return()
  endif()
endforeach()

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
if(NOT TORCH_LIBRARIES)
  set(TORCH_LIBRARIES torchamp::libtorch)
endif()

if(NOT TARGET torchamp::torchamp AND torchamp_FIND_COMPONENTS MATCHES "headers|library|compiled")
  include(${CMAKE_CURRENT_LIST_DIR}/torchamp-targets.cmake)
endif()
if(torchamp_FIND_COMPONENTS MATCHES "library|compiled")
  include(${CMAKE_CURRENT_LIST_DIR}/TorchampCompiled.cmake)
  torchamp_add_compiled()
endif()
