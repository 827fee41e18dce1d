# SPDX-License-Identifier: BSD-3-Clause
# cmake -DNAMES_OF=FILE -DERROR=n -DVERSION=NODE -DNM=nm -DOUT=PREFIX -P stubs.cmake
#
# Writes PREFIX.cpp, with a function for each name that a library exports or that FILE.txt lists,
# and PREFIX.map, with the version of their symbols. Each function returns the error n and writes
# its name into the log. It is weak, so a function of the simulation with this name replaces it.
if(NAMES_OF MATCHES "[.]txt$")
  file(STRINGS ${NAMES_OF} names)
else()
  execute_process(COMMAND ${NM} -D --defined-only ${NAMES_OF} OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL " [TWi] [A-Za-z0-9_]+" names "${lines}")
  list(TRANSFORM names REPLACE "^ [TWi] " "")
endif()
list(FILTER names INCLUDE REGEX "^(cu|__cuda|nccl)")
list(REMOVE_DUPLICATES names)
set(text "extern \"C\" void stand_in_missing(const char* name);\n")
foreach(name IN LISTS names)
  string(APPEND text "extern \"C\" __attribute__((weak)) int ${name}() { stand_in_missing(\"${name}\"); return ${ERROR}; }\n")
endforeach()
file(WRITE ${OUT}.cpp "${text}")
file(WRITE ${OUT}.map "${VERSION} { global: *; };\n")
