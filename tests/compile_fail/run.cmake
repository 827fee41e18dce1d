# SPDX-License-Identifier: BSD-3-Clause
# Compiles FILE. Above each forbidden use in FILE is a comment line "// error: REGEX". The use, which
# is the next line, must cause an error that matches REGEX: an error in this line, or an error in a
# header that this line includes or whose template it instantiates.
#
#   cmake -DFILE=PATH -DCOMPILE=COMMAND… -P run.cmake

cmake_minimum_required(VERSION 3.25)

# Moves the first line of a text to `line`. (Lists of lines also split at other characters.)
function(next_line text)
  string(FIND "${${text}}" "\n" end)
  string(SUBSTRING "${${text}}" 0 ${end} line)
  math(EXPR end "${end} + 1")
  string(SUBSTRING "${${text}}" ${end} -1 rest)
  set(line "${line}" PARENT_SCOPE)
  set(${text} "${rest}" PARENT_SCOPE)
endfunction()

# ---- The forbidden uses ---------------------------------------------------------------------------

file(READ ${FILE} source)
set(uses "")
set(number 0)
while(NOT source STREQUAL "")
  next_line(source)
  math(EXPR number "${number} + 1")
  if(DEFINED expected_${number})
    list(APPEND uses ${number})
    set(use_${number} "${FILE}:${number}: ${line}")
    set(errors_${number} "")
  endif()
  if(line MATCHES "^ *// error: (.+)$")
    math(EXPR next "${number} + 1")
    set(expected_${next} "${CMAKE_MATCH_1}")
  endif()
endwhile()
if(NOT uses)
  message(FATAL_ERROR "${FILE} has no line \"// error: REGEX\" above another line.")
endif()

# ---- The errors -----------------------------------------------------------------------------------

# Records that `error` is an error of a line.
function(add_error number)
  set(errors_${number} "${errors_${number}}\n  ${error}" PARENT_SCOPE)
  if(DEFINED expected_${number} AND error MATCHES "${expected_${number}}")
    set(matched_${number} TRUE PARENT_SCOPE)
  endif()
endfunction()

execute_process(COMMAND ${COMPILE} ${FILE} OUTPUT_VARIABLE output ERROR_VARIABLE output)
# g++ prints the instantiation before the errors in the template, clang++ after the first of them.
set(rest "${output}\n")
set(before 0)
set(after 0)
set(is_in_header FALSE)
while(NOT rest STREQUAL "")
  next_line(rest)
  string(REPLACE "${FILE}:" "FILE:" line "${line}")
  if(line MATCHES "^.* from FILE:([0-9]+)[:,]")
    set(before ${CMAKE_MATCH_1})
  elseif(line MATCHES "^FILE:([0-9]+):[0-9]+: +required from")
    set(before ${CMAKE_MATCH_1})
  elseif(line MATCHES "^FILE:([0-9]+):[0-9]+: note: .* requested here")
    set(after ${CMAKE_MATCH_1})
    add_error(${after})
    set(is_in_header FALSE)
  elseif(line MATCHES "^(.+):([0-9]+):[0-9]+: (fatal )?error: (.+)$")
    if(is_in_header)
      add_error(${after})
    endif()
    set(error "${CMAKE_MATCH_4}")
    if(line MATCHES "^FILE:([0-9]+)")
      add_error(${CMAKE_MATCH_1})
      set(is_in_header FALSE)
    else()
      add_error(${before})
      set(is_in_header TRUE)
    endif()
  endif()
endwhile()
if(is_in_header)
  add_error(${after})
endif()

# ---- The result -----------------------------------------------------------------------------------

set(failed 0)
foreach(use IN LISTS uses)
  if(errors_${use} STREQUAL "")
    message(NOTICE "COMPILED: ${use_${use}}")
  elseif(NOT DEFINED matched_${use})
    message(NOTICE "OTHER MESSAGE than \"${expected_${use}}\": ${use_${use}}${errors_${use}}")
  else()
    continue()
  endif()
  math(EXPR failed "${failed} + 1")
endforeach()
if(failed)
  message(NOTICE "${output}")
  list(LENGTH uses count)
  message(FATAL_ERROR "${failed} of ${count} forbidden uses do not fail as they should.")
endif()
