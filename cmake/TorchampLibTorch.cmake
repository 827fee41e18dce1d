# SPDX-License-Identifier: BSD-3-Clause
include_guard(DIRECTORY)

function(torchamp_find_libtorch)
  if(TARGET torchamp::libtorch)
    return()
  endif()
  foreach(candidate IN LISTS CMAKE_PREFIX_PATH)
    if(EXISTS ${candidate}/share/cmake/Torch/TorchConfig.cmake)
      set(prefix ${candidate})
      break()
    endif()
  endforeach()
  if(NOT prefix)
    message(FATAL_ERROR "torchamp: no LibTorch found; name it with -DCMAKE_PREFIX_PATH=…")
  endif()
  find_package(Threads REQUIRED)
  add_library(torchamp::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(
    torchamp::libtorch INTERFACE ${prefix}/include ${prefix}/include/torch/csrc/api/include)
  foreach(name IN ITEMS torch_cpu c10)
    add_library(torchamp::${name} SHARED IMPORTED GLOBAL)
    set_target_properties(
      torchamp::${name}
      PROPERTIES IMPORTED_LOCATION
                 ${prefix}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX})
    target_link_libraries(torchamp::libtorch INTERFACE torchamp::${name})
  endforeach()
  target_link_libraries(torchamp::libtorch INTERFACE Threads::Threads)
endfunction()
