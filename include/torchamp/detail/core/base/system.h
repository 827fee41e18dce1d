// SPDX-License-Identifier: BSD-3-Clause
// Functions that differ between operating systems. Files: detail/extras/io/open_file.h. Sockets:
// detail/extras/distributed/loopback.h. No other header depends on the system.
#pragma once

#ifdef _WIN32
#include <c10/util/win32-headers.h>
#else
#include <dlfcn.h>
#endif

#include <cstdlib>
#include <string>
#include <system_error>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

#ifdef _WIN32

/// The file of the shared library, or program, that this is compiled into; empty if unknown.
inline std::string this_library() {
  HMODULE library = nullptr;
  char name[MAX_PATH] = "";
  if (::GetModuleHandleExA(
          GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
          reinterpret_cast<LPCSTR>(&this_library), &library) != 0) {
    (void)::GetModuleFileNameA(library, name, MAX_PATH);
  }
  return name;
}

/// Keeps it loaded until the process ends.
inline void pin_this_library() {
  HMODULE pinned = nullptr;
  (void)::GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                             reinterpret_cast<LPCSTR>(&this_library), &pinned);
}

#else

/// The file of the shared library, or program, that this is compiled into; empty if unknown.
inline std::string this_library() {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(&this_library), &info) != 0 ? info.dli_fname : "";
}

/// Keeps it loaded until the process ends.
inline void pin_this_library() {
  // Null for the main program, which stays anyway.
  [[maybe_unused]] static void* const pinned =
      dlopen(this_library().c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

#endif

/// An environment variable's value; null if it is not set. Valid until the environment changes.
inline const char* environment_variable(const char* name) {
#ifdef _MSC_VER
#pragma warning(suppress : 4996)  // cl.exe suggests its own function instead
#endif
  return std::getenv(name);
}

/// The system's text for a value of errno.
inline std::string error_text(int number) {
  return std::generic_category().message(number);
}

}  // namespace TORCHAMP_NAMESPACE::detail
