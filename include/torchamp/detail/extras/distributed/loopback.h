// SPDX-License-Identifier: BSD-3-Clause
// The sockets of POSIX and of Windows, as make_process_group() uses them.
#pragma once

#ifdef _WIN32
#include <c10/util/win32-headers.h>
#include <winsock2.h>
#else
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#endif

#include <c10/util/Exception.h>

#include <charconv>
#include <csignal>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether `host` is "localhost" or an address 127.x.x.x, not a name that looks like one.
inline bool is_loopback(std::string_view host) {
  if (host == "localhost") return true;
  const char* next = host.data();
  const char* const end = next + host.size();
  for (int part = 0; part < 4; ++part) {
    unsigned number = 256;
    if (part > 0 && (next == end || *next++ != '.')) return false;
    const char* const begin = next;
    const auto read = std::from_chars(begin, end, number);
    next = read.ptr;
    if (read.ec != std::errc() || number > 255 || (part == 0 && number != 127)) return false;
    if (next - begin > 1 && *begin == '0') return false;
  }
  return next == end;
}

#ifdef _WIN32

inline void ignore_broken_pipes() {}  // Windows has no such signal

using Socket = SOCKET;
inline bool is_socket(Socket socket) {
  return socket != INVALID_SOCKET;
}
inline int close_socket(Socket socket) {
  return ::closesocket(socket);
}
inline std::error_code socket_error() {
  return {::WSAGetLastError(), std::system_category()};
}
inline Socket new_socket() {
  WSADATA unused;
  (void)::WSAStartup(MAKEWORD(2, 2), &unused);
  return ::WSASocketW(AF_INET, SOCK_STREAM, 0, nullptr, 0,
                      WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT);
}
inline constexpr int own_port = SO_EXCLUSIVEADDRUSE;  // as a port is on POSIX anyway

#else

/// Ignores SIGPIPE if it has no handler.
inline void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) return;
  if (action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

using Socket = int;
inline bool is_socket(Socket socket) {
  return socket >= 0;
}
inline int close_socket(Socket socket) {
  return ::close(socket);
}
inline std::error_code socket_error() {
  return {errno, std::generic_category()};
}
inline Socket new_socket() {
#ifdef SOCK_CLOEXEC
  return ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
#else
  return ::socket(AF_INET, SOCK_STREAM, 0);
#endif
}
inline constexpr int own_port = SO_REUSEADDR;  // works even directly after another run

#endif

/// A socket that accepts connections from this machine only.
inline int loopback_socket(uint16_t port) {
  const Socket socket = new_socket();
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!is_socket(socket) ||
      ::setsockopt(socket, SOL_SOCKET, own_port, reinterpret_cast<const char*>(&yes), sizeof yes) !=
          0 ||
      ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket, 1024) != 0) {
    const std::error_code error = socket_error();
    if (is_socket(socket)) (void)close_socket(socket);
    TORCH_CHECK(false, "make_process_group: cannot listen on 127.0.0.1:", port, ": ",
                error.message(), ". Is another run using MASTER_PORT?");
  }
  return static_cast<int>(socket);
}

}  // namespace TORCHAMP_NAMESPACE::detail
