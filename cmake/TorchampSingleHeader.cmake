# SPDX-License-Identifier: BSD-3-Clause
# Writes torchamp.h, and all headers of torchamp that it includes, as one file without other headers of torchamp.
#
#   cmake -DSOURCE=DIR -DOUTPUT=FILE -P TorchampSingleHeader.cmake
#
# Each header is inserted at its first include. LibTorch's and the standard's headers are included once. Includes in an
# #if stay where they are. The file is header-only: it has the code of the -inl.h headers.

cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/TorchampMarkdown.cmake)

set_property(GLOBAL PROPERTY text "")
set_property(GLOBAL PROPERTY ours "")
set_property(GLOBAL PROPERTY others "")

# Appends `header`, a path below include/.
function(append_header header)
  get_property(ours GLOBAL PROPERTY ours)
  if(header IN_LIST ours)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY ours ${header})
  torchamp_markdown_lines(lines ${SOURCE}/include/${header})
  set(conditions "")  # the open #ifs, innermost first: `kept`, or `true`, whose condition is true here and which is omitted
  set(kept 0)         # how many of them are kept
  set(piece "")
  set(empty ON)
  foreach(line IN LISTS lines)
    if(line MATCHES "^// SPDX-|^#pragma once|^/// @file$")
      continue()
    elseif(line MATCHES "^#include \"(torchamp/[^\"]+)\"")
      if(kept)
        message(FATAL_ERROR "${header} includes ${CMAKE_MATCH_1} in an #if: one file cannot hold that")
      endif()
      set_property(GLOBAL APPEND_STRING PROPERTY text "${piece}")
      set(piece "")
      append_header(${CMAKE_MATCH_1})
      continue()
    elseif(line MATCHES "^#include <([^>]+)>")
      get_property(others GLOBAL PROPERTY others)
      if(CMAKE_MATCH_1 IN_LIST others)
        continue()
      elseif(NOT kept)
        set_property(GLOBAL APPEND PROPERTY others ${CMAKE_MATCH_1})
      endif()
      string(REGEX REPLACE " *// IWYU.*" "" line "${line}")
    elseif(line MATCHES "^#(if TORCHAMP_BODIES|ifndef TORCHAMP_(COMPILED|[A-Z_]+_(BODIES|TEMPLATES))$)")
      list(PREPEND conditions true)
      continue()
    elseif(line MATCHES "^# *if")
      list(PREPEND conditions kept)
      math(EXPR kept "${kept} + 1")
    elseif(line MATCHES "^# *e(lse|lif|ndif)")
      list(GET conditions 0 innermost)
      if(innermost STREQUAL "true" AND NOT line MATCHES "endif")
        message(FATAL_ERROR "${header}: the ${line} belongs to an #if that always holds in one file")
      endif()
      if(line MATCHES "endif")
        list(POP_FRONT conditions)
        if(innermost STREQUAL "true")
          continue()
        endif()
        math(EXPR kept "${kept} - 1")
      endif()
    endif()
    if(line STREQUAL "" AND empty)  # from a block of includes
      continue()
    endif()
    string(APPEND piece "${line}\n")
    set(empty OFF)
    if(line STREQUAL "")
      set(empty ON)
    endif()
  endforeach()
  set_property(GLOBAL APPEND_STRING PROPERTY text "${piece}")
endfunction()

append_header(torchamp/version.h)  # its errors come before the errors of LibTorch's headers
append_header(torchamp/torchamp.h)
get_property(text GLOBAL PROPERTY text)
torchamp_markdown_text(text "${text}")

file(STRINGS ${SOURCE}/include/torchamp/version.h version REGEX "define TORCHAMP_VERSION_[A-Z]+ [0-9]+")
string(REGEX REPLACE "[^0-9;]" "" version "${version}")
list(JOIN version "." version)
file(READ ${SOURCE}/LICENSE license)
string(STRIP "${license}" license)
string(REPLACE "\n" "\n// " license "// ${license}")
string(REGEX REPLACE " +\n" "\n" license "${license}")
file(WRITE ${OUTPUT} "\
// SPDX-License-Identifier: BSD-3-Clause
// torchamp ${version} in one file: torchamp/torchamp.h and what it includes, without the extras. The target
// single_header makes it from torchamp's headers: change those. A program has this file or those headers, not both.
//
${license}
#pragma once

#ifdef TORCHAMP_COMPILED
#error \"torchamp's single header cannot be compiled apart: do not define TORCHAMP_COMPILED.\"
#endif
#ifdef TORCHAMP_VERSION
#error \"torchamp's single header comes after another header of torchamp: include one of the two.\"
#endif

${text}")
