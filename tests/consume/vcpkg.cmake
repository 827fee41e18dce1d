# SPDX-License-Identifier: BSD-3-Clause
# Runs the steps of the vcpkg port, with CMake's functions and with replacements for vcpkg's functions. The package is
# then in ${WORK}/prefix.

set(PORT torchamp)
set(CURRENT_PORT_DIR ${SOURCE}/cmake/packages/vcpkg/torchamp)
set(CURRENT_PACKAGES_DIR ${WORK}/prefix)

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" SOURCE_PATH OPTIONS)
  run(${CMAKE_COMMAND} -S ${arg_SOURCE_PATH} -B ${WORK}/vcpkg --install-prefix ${CURRENT_PACKAGES_DIR} ${ARGS}
      ${arg_OPTIONS} -DCMAKE_ERROR_ON_ABSOLUTE_INSTALL_DESTINATION=ON)
endfunction()
function(vcpkg_cmake_install)
  run(${CMAKE_COMMAND} --build ${WORK}/vcpkg --target install)
endfunction()
function(vcpkg_cmake_config_fixup)  # moves nothing, because the files are already in the expected folder
  file(GLOB config ${CURRENT_PACKAGES_DIR}/share/${PORT}/${PORT}-config.cmake)
  if(NOT config OR EXISTS ${CURRENT_PACKAGES_DIR}/share/cmake)
    message(FATAL_ERROR "the port's CMake files are not in share/${PORT}")
  endif()
endfunction()
function(vcpkg_fixup_pkgconfig)
  if(NOT EXISTS ${CURRENT_PACKAGES_DIR}/share/pkgconfig/torchamp.pc)
    message(FATAL_ERROR "the port has no share/pkgconfig/torchamp.pc")
  endif()
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" FILE_LIST)
  file(INSTALL ${arg_FILE_LIST} DESTINATION ${CURRENT_PACKAGES_DIR}/share/${PORT} RENAME copyright)
endfunction()

include(${CURRENT_PORT_DIR}/portfile.cmake)
file(STRINGS ${WORK}/prefix/share/torchamp/torchamp-config-version.cmake line REGEX "set\\(PACKAGE_VERSION \"")
file(READ ${CURRENT_PORT_DIR}/vcpkg.json manifest)
string(JSON version GET "${manifest}" version)
if(NOT line MATCHES "\"${version}\"")
  message(FATAL_ERROR "vcpkg.json has version ${version}, the package has ${line}")
endif()
foreach(file IN ITEMS copyright usage)
  if(NOT EXISTS ${WORK}/prefix/share/torchamp/${file})
    message(FATAL_ERROR "the port installs no ${file}")
  endif()
endforeach()
