# SPDX-License-Identifier: BSD-3-Clause
# The training loop of guards.md with only the single header, in a program with two source files that include it.

include(${SOURCE}/cmake/TorchampMarkdown.cmake)
run(${CMAKE_COMMAND} -DSOURCE=${SOURCE} -DOUTPUT=${WORK}/include/torchamp.h -P ${SOURCE}/cmake/TorchampSingleHeader.cmake)
file(READ ${WORK}/include/torchamp.h text)
if(text MATCHES "#include \"")
  message(FATAL_ERROR "the single header includes another file of torchamp's")
endif()

# The block of guards.md that includes torchamp.h
torchamp_markdown_lines(lines ${SOURCE}/examples/guide/guards.md)
set(loop "")
foreach(line IN LISTS lines)
  if(line STREQUAL "#include <torchamp/torchamp.h>")
    set(loop "\n")
  elseif(loop AND line STREQUAL "```")
    break()
  elseif(loop)
    string(APPEND loop "${line}\n")
  endif()
endforeach()
torchamp_markdown_text(loop "${loop}")
foreach(line IN ITEMS "torchamp::AutocastGuard autocast" "scaler.step(optimizer)" "scaler.update()")
  string(FIND "${loop}" "${line}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "the training loop of guards.md has no ${line}")
  endif()
endforeach()
file(WRITE ${WORK}/include/loop.inc "${loop}")
run(${CMAKE_COMMAND} -S ${SOURCE}/tests/consume/single_header -B ${WORK}/build ${ARGS} -DHEADER=${WORK}/include -DCMAKE_BUILD_TYPE=
    "-DCMAKE_PREFIX_PATH=${BUILD}\;${LIBTORCH}")
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/program)
