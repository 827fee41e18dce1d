# SPDX-License-Identifier: BSD-3-Clause
# The headers in the tree are those that CMake installs, and the umbrella header stays light: it brings in neither all of
# <torch/torch.h> nor the standard headers that take long to compile. Each puts what it has into the namespace of its version.
#
#   cmake -DSOURCE=DIR -DHEADERS=LIST -DCOMPILE=COMMAND… -P run.cmake

file(GLOB_RECURSE present ${SOURCE}/include/*.h)
list(REMOVE_ITEM present ${HEADERS})
if(present)
  message(SEND_ERROR "not listed in CMakeLists.txt: ${present}")
endif()

execute_process(COMMAND ${COMPILE} -x c++ -M ${SOURCE}/include/torchamp/torchamp.h
                OUTPUT_VARIABLE depends COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^ ]*/(torch/(torch|all|nn)[.]h|regex|filesystem|fstream|random)[ \n]" heavy "${depends}")
if(heavy)
  message(SEND_ERROR "torchamp/torchamp.h brings in ${heavy}")
endif()

foreach(header IN LISTS HEADERS)
  file(READ ${header} text)
  if(text MATCHES "namespace torchamp {" OR (text MATCHES "namespace torchamp::detail {" AND NOT text MATCHES "#include \"torchamp/"))
    message(SEND_ERROR "${header}: include torchamp/version.h and open namespace TORCHAMP_NAMESPACE, as its note says")
  endif()
endforeach()
