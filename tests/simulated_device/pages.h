// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

namespace simulated {

// What the simulated accelerator asks of the operating system.

std::size_t page_size();

/// As many bytes of addresses, which fault when touched; null if there are none left.
char* reserve_pages(std::size_t bytes);

/// Lets whole pages be touched, or makes them fault again. Whether the system has done so.
bool open_pages(char* base, std::size_t bytes);
bool close_pages(char* base, std::size_t bytes);

/// Forgets what closed pages hold.
void discard_pages(char* base, std::size_t bytes);

/// Bytes, in number a multiple of 64, that begin at such an address, and their end.
void* aligned_bytes(std::size_t bytes);
void free_aligned_bytes(void* base);

/// Before a fault ends the program, `whose` names the address, and stderr gets that text, unless it
/// is null, with the calls that led there where the system tells them.
void explain_page_faults(const char* (*whose)(std::uintptr_t address));

}  // namespace simulated
