# SPDX-License-Identifier: BSD-3-Clause
# cmake [-DWRITE=ON] -P diffs.cmake
# Compares the differences between the programs here with guide/porting.md. Fails if the page has other ones, or with
# WRITE, writes them into the page.
set(page ${CMAKE_CURRENT_LIST_DIR}/../guide/porting.md)
file(READ ${page} text)
set(expected "${text}")
set(kinds removed added)
set(signs "-" "+")
foreach(name IN ITEMS classifier dcgan language_model image_captioning ppo splatting)
  execute_process(
    COMMAND diff -U1 --label ${name}.cpp --label ${name}_mixed.cpp ${name}.cpp ${name}_mixed.cpp
    WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR}
    OUTPUT_VARIABLE difference RESULT_VARIABLE code)
  if(NOT code STREQUAL "1")  # 0: none
    message(FATAL_ERROR "diff of ${name}: ${code}")
  endif()
  string(REGEX REPLACE "\n@@[^\n]*" "\n@@" difference "${difference}")
  foreach(kind sign IN ZIP_LISTS kinds signs)
    string(REGEX MATCHALL "\n[${sign}]" lines "\n${difference}")
    list(LENGTH lines ${kind})
    math(EXPR ${kind} "${${kind}} - 1")  # the name
  endforeach()
  if(added GREATER 9)
    message(FATAL_ERROR "${name}: ${added} lines are added, which are not under ten")
  endif()
  set(row "| [${name}](../adoption/${name}.cpp) | ${removed} | ${added} |")
  string(FIND "${text}" "${row}\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "guide/porting.md lacks the row ${row}")
  endif()
  string(FIND "${expected}" "```diff\n--- ${name}.cpp\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "guide/porting.md has no diff of ${name}.cpp")
  endif()
  string(SUBSTRING "${expected}" 0 ${begin} before)
  string(SUBSTRING "${expected}" ${begin} -1 after)
  string(REGEX REPLACE "^```diff\n([^`]*)```" "```diff\n${difference}```" after "${after}")
  set(expected "${before}${after}")
endforeach()
if(WRITE)
  file(WRITE ${page} "${expected}")
elseif(NOT expected STREQUAL text)
  message(FATAL_ERROR "guide/porting.md prints other diffs than these files have; write them there by\n"
                      "  cmake -DWRITE=ON -P ${CMAKE_CURRENT_LIST_FILE}")
endif()
