# SPDX-License-Identifier: BSD-3-Clause
# An overlay port of the source tree that contains it:
#
#   vcpkg install torchamp --overlay-ports=TORCHAMP/cmake/packages/vcpkg
#
# LibTorch is not a dependency: the project that uses the package finds or fetches LibTorch. tests/consume runs these
# steps with replacements for vcpkg's functions; vcpkg itself has not run them.

set(VCPKG_BUILD_TYPE release)  # headers alone
cmake_path(SET source NORMALIZE "${CURRENT_PORT_DIR}/../../../..")
vcpkg_cmake_configure(
  SOURCE_PATH "${source}"
  OPTIONS -DTORCHAMP_PACKAGE_ONLY=ON -DTORCHAMP_CMAKE_DIR=share/${PORT})
vcpkg_cmake_install()
vcpkg_cmake_config_fixup()
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc")
vcpkg_install_copyright(FILE_LIST "${source}/LICENSE")
file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
