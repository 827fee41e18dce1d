# SPDX-License-Identifier: BSD-3-Clause
# The Debian package, unpacked, and a program whose compiler gets its flags from pkg-config.

find(dpkg_deb dpkg-deb "apt install dpkg")
find(pkg_config pkg-config "apt install pkgconf")
run(${CPACK} -G DEB --config ${BUILD}/CPackConfig.cmake -B ${WORK})
file(GLOB package ${WORK}/torchamp_*_all.deb)
run(${dpkg_deb} -x ${package} ${WORK}/unpacked)
execute_process(COMMAND ${dpkg_deb} -f ${package} Version OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
set(ENV{PKG_CONFIG_PATH} ${WORK}/unpacked/usr/share/pkgconfig)
run(${pkg_config} --exact-version=${version} torchamp)
execute_process(COMMAND ${pkg_config} --define-variable=libtorch=${LIBTORCH} --cflags --libs torchamp
                OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${COMPILE} -std=c++20 ${SOURCE}/tests/consume/main.cpp ${flags} ${LINK} -o ${WORK}/program)
run(${WORK}/program)
