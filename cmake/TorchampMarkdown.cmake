# SPDX-License-Identifier: BSD-3-Clause
# Functions for TorchampReadme.cmake and TorchampDocs.cmake: the lines of a Markdown file, and the anchors of its
# headings.

# Sets `lines` to the lines of `file`. Characters of CMake's own syntax are replaced: see torchamp_markdown_text.
function(torchamp_markdown_lines lines file)
  file(READ ${file} text)
  string(REPLACE ";" "@SEMICOLON@" text "${text}")
  string(REPLACE "[" "@OPEN@" text "${text}")
  string(REPLACE "]" "@CLOSE@" text "${text}")
  string(REPLACE "\\" "@BACKSLASH@" text "${text}")
  string(REPLACE "\n" ";" text "${text}")
  set(${lines} "${text}" PARENT_SCOPE)
endfunction()

# Sets `text` to the text of `line` in the file.
function(torchamp_markdown_text text line)
  string(REPLACE "@BACKSLASH@" "\\" line "${line}")
  string(REPLACE "@OPEN@" "[" line "${line}")
  string(REPLACE "@CLOSE@" "]" line "${line}")
  string(REPLACE "@SEMICOLON@" ";" line "${line}")
  set(${text} "${line}" PARENT_SCOPE)
endfunction()

# Sets `anchor` to GitHub's anchor of the heading `line`, or to "" if `line` is no heading.
function(torchamp_markdown_anchor anchor line)
  set(found "")
  if(line MATCHES "^#+ (.+)$")
    string(TOLOWER "${CMAKE_MATCH_1}" found)
    string(REGEX REPLACE "[^a-z0-9 _-]" "" found "${found}")
    string(REPLACE " " "-" found "${found}")
  endif()
  set(${anchor} "${found}" PARENT_SCOPE)
endfunction()

# Sets `anchors` to the anchors of the headings of `file`.
function(torchamp_markdown_anchors anchors file)
  torchamp_markdown_lines(lines ${file})
  set(all "")
  set(code OFF)
  foreach(line IN LISTS lines)
    if(line MATCHES "^```")
      if(code)
        set(code OFF)
      else()
        set(code ON)
      endif()
    elseif(NOT code)
      torchamp_markdown_anchor(anchor "${line}")
      list(APPEND all ${anchor})
    endif()
  endforeach()
  set(${anchors} "${all}" PARENT_SCOPE)
endfunction()
