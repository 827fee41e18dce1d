# SPDX-License-Identifier: BSD-3-Clause
"""torchamp's headers and CMake package, from the source tree that contains this file:

    conan create TORCHAMP/cmake/packages/conan

LibTorch is not a requirement: the project that uses the package finds its own (CMAKE_PREFIX_PATH or Torch_ROOT, as variable
or in the environment; Python's torch), or fetches one.
"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy, load, rmdir


class Torchamp(ConanFile):
    name = "torchamp"
    description = "Automatic mixed precision for LibTorch"
    license = "BSD-3-Clause"
    topics = ("libtorch", "mixed-precision", "autocast")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _tree(self):
        return os.path.normpath(os.path.join(self.recipe_folder, *[os.pardir] * 3))

    def set_version(self):
        text = load(self, os.path.join(self._tree, "include", "torchamp", "version.h"))
        self.version = ".".join(re.findall(r"define TORCHAMP_VERSION_[A-Z]+ ([0-9]+)", text))

    def export_sources(self):
        for pattern in "CMakeLists.txt", "LICENSE", "include/*", "cmake/*":
            copy(self, pattern, self._tree, self.export_sources_folder)

    def package_id(self):
        self.info.clear()

    def validate(self):
        # See "Systems" in examples/guide/install.md.
        known = {"Linux": ("x86_64", "armv8"), "Macos": ("armv8",)}
        system, arch = str(self.settings.os), str(self.settings.arch)
        if arch not in known.get(system, ()):
            raise ConanInvalidConfiguration(f"torchamp has never been built for {system} on {arch}")

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.cache_variables["TORCHAMP_PACKAGE_ONLY"] = True
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        rmdir(self, os.path.join(self.package_folder, "share", "doc"))

    def package_info(self):
        # The package brings its own CMake files, which know how to find LibTorch.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "torchamp")]
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
