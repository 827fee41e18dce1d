# SPDX-License-Identifier: BSD-3-Clause
# The warnings for torchamp's own tests and examples. Projects that use torchamp do not get them.

function(torchamp_warnings target)
  if(MSVC)
    target_compile_options(${target} PRIVATE /W4 $<$<BOOL:${TORCHAMP_WERROR}>:/WX>)
    return()
  endif()
  target_compile_options(
    ${target}
    PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
            $<$<BOOL:${TORCHAMP_WERROR}>:-Werror>)
endfunction()
