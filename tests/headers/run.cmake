# SPDX-License-Identifier: BSD-3-Clause
# The headers in the tree are those that CMake installs, the umbrella includes every public one but one, and none of them brings
# in all of <torch/torch.h>.
#
#   cmake -DSOURCE=DIR -DHEADERS=LIST -DCOMPILE=COMMAND… -P run.cmake

file(GLOB_RECURSE present ${SOURCE}/include/*.h)
list(REMOVE_ITEM present ${HEADERS})
if(present)
  message(SEND_ERROR "not listed in CMakeLists.txt: ${present}")
endif()

file(READ ${SOURCE}/include/torchamp/torchamp.h umbrella)
file(GLOB public RELATIVE ${SOURCE}/include ${SOURCE}/include/torchamp/*.h)
list(REMOVE_ITEM public torchamp/torchamp.h torchamp/cuda_graph.h)  # this one brings in CUDA's headers
foreach(header IN LISTS public)
  if(NOT umbrella MATCHES "#include \"${header}\"")
    message(SEND_ERROR "torchamp/torchamp.h does not include ${header}")
  endif()
endforeach()

execute_process(COMMAND ${COMPILE} -x c++ -M ${SOURCE}/include/torchamp/torchamp.h
                OUTPUT_VARIABLE depends COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^ ]*/torch/(torch|all|nn)[.]h" heavy "${depends}")
if(heavy)
  message(SEND_ERROR "torchamp/torchamp.h brings in ${heavy}")
endif()
