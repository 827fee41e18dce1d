# SPDX-License-Identifier: BSD-3-Clause
# The umbrella header includes neither all of <torch/torch.h> nor standard headers that take long to compile. If a file
# includes public headers and uses none of their names, the compiler emits no code for them: see "Compiled once" in
# .github/CONTRIBUTING.md.
#
#   cmake -DSOURCE=DIR -DCOMPILE=COMMAND… -DNM=COMMAND -DBUILD=DIR -P run.cmake

execute_process(COMMAND ${COMPILE} -x c++ -M ${SOURCE}/include/torchamp/torchamp.h
                OUTPUT_VARIABLE depends COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^ ]*/(torch/(torch|all|nn)[.]h|regex|filesystem|fstream|random)[ \n]" heavy "${depends}")
if(heavy)
  message(SEND_ERROR "torchamp/torchamp.h brings in ${heavy}")
endif()

file(GLOB public RELATIVE ${SOURCE}/include ${SOURCE}/include/torchamp/*.h ${SOURCE}/include/torchamp/distributed/*.h
     ${SOURCE}/include/torchamp/labs/*.h)
# Except compiled.h, headers that need more than LibTorch, and headers that register themselves or include such a
# header.
list(FILTER public EXCLUDE REGEX
     "/(compiled|fp8|nccl|policy_file|policy_text|precision_audit|process_group|weight_cache|weights_together)[.]h$")
list(TRANSFORM public REPLACE "(.+)" "#include <\\1>\n")
list(JOIN public "" includes)
file(WRITE ${BUILD}/unused.cpp "${includes}")
list(REMOVE_ITEM COMPILE -fsyntax-only)
execute_process(COMMAND ${COMPILE} -c ${BUILD}/unused.cpp -o ${BUILD}/unused.o COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${NM} --demangle --defined-only ${BUILD}/unused.o OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL " (W|T|V vtable for) torchamp::[^\n]*" emitted "${symbols}")
if(emitted)
  message(SEND_ERROR "including the public headers alone emits ${emitted}")
endif()
