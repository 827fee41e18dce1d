// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/pages.h"

#ifdef _WIN32
#include <c10/util/win32-headers.h>

#include <cstdio>
#include <cstdlib>
#else
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#endif

namespace simulated {

namespace {

const char* (*whose_address)(std::uintptr_t) = nullptr;

}  // namespace

#ifdef _WIN32

namespace {

LONG CALLBACK on_fault(EXCEPTION_POINTERS* raised) {
  const EXCEPTION_RECORD& record = *raised->ExceptionRecord;
  if (record.ExceptionCode == EXCEPTION_ACCESS_VIOLATION && record.NumberParameters > 1) {
    const char* const text = whose_address(record.ExceptionInformation[1]);
    if (text) std::fputs(text, stderr);
  }
  return EXCEPTION_CONTINUE_SEARCH;
}

}  // namespace

std::size_t page_size() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}

char* reserve_pages(std::size_t bytes) {
  return static_cast<char*>(VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS));
}

bool open_pages(char* base, std::size_t bytes) {
  DWORD before = 0;
  return VirtualAlloc(base, bytes, MEM_COMMIT, PAGE_READWRITE) &&
         VirtualProtect(base, bytes, PAGE_READWRITE, &before) != 0;
}

bool close_pages(char* base, std::size_t bytes) {
  DWORD before = 0;
  return VirtualProtect(base, bytes, PAGE_NOACCESS, &before) != 0;
}

void discard_pages(char* base, std::size_t bytes) {
  VirtualFree(base, bytes, MEM_DECOMMIT);
}

void* aligned_bytes(std::size_t bytes) {
  return _aligned_malloc(bytes, 64);
}

void free_aligned_bytes(void* base) {
  _aligned_free(base);
}

void explain_page_faults(const char* (*whose)(std::uintptr_t)) {
  whose_address = whose;
  AddVectoredExceptionHandler(/*First=*/1, &on_fault);
}

#else

namespace {

void on_fault(int number, siginfo_t* info, void*) {
  const char* const text = whose_address(reinterpret_cast<std::uintptr_t>(info->si_addr));
  if (text) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) _exit(139);
    std::array<void*, 64> frames{};
    backtrace_symbols_fd(frames.data(), backtrace(frames.data(), 64), STDERR_FILENO);
  }
  std::signal(number, SIG_DFL);  // returning runs into the fault again
}

}  // namespace

std::size_t page_size() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

char* reserve_pages(std::size_t bytes) {
  void* const base =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

bool open_pages(char* base, std::size_t bytes) {
  return mprotect(base, bytes, PROT_READ | PROT_WRITE) == 0;
}

bool close_pages(char* base, std::size_t bytes) {
  return mprotect(base, bytes, PROT_NONE) == 0;
}

void discard_pages(char* base, std::size_t bytes) {
  madvise(base, bytes, MADV_DONTNEED);
}

void* aligned_bytes(std::size_t bytes) {
  return std::aligned_alloc(64, bytes);
}

void free_aligned_bytes(void* base) {
  std::free(base);
}

void explain_page_faults(const char* (*whose)(std::uintptr_t)) {
  whose_address = whose;
  std::array<void*, 1> frame{};
  backtrace(frame.data(), 1);  // loads what it needs now, not in the handler
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);  // what macOS sends instead
}

#endif

}  // namespace simulated
