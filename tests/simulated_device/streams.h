// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace simulated {

class Capture;

/// How far each stream has got, by its number.
using Clock = std::map<int64_t, std::uint64_t>;

/// One piece of work: the `count`th of a stream.
struct Stamp {
  int64_t stream = -1;
  std::uint64_t count = 0;
};

/// The work that last used a block of memory.
struct Accesses {
  int64_t home = 0;  ///< the stream whose memory it is
  Stamp written;
  std::vector<Stamp> read;     ///< since it was written
  std::set<int64_t> recorded;  ///< streams that Tensor::record_stream named
};

// Note [What is deferred]
// Kernels run when they are launched: their results could not be known later, when their inputs may
// be gone. Clocks model that a stream is asynchronous. Each stream counts its work and knows how
// much of every other stream's it has waited for; work that uses what another stream wrote, without
// having waited for it, is an error at once, where hardware would sometimes give wrong numbers.
// What the host can see is deferred truly: a non-blocking copy to pinned memory is written when
// something waits for it, or `host_runs_ahead` pieces of work later, and a non-blocking copy from
// it looks then whether the host has left the memory alone.
inline constexpr std::uint64_t host_runs_ahead = 64;

// ---- Streams: 0 is sim:0's default stream, 1 is sim:1's, more are made on request ---------

int64_t current_stream(c10::DeviceIndex device);
int64_t exchange_stream(c10::DeviceIndex device, int64_t stream);
int64_t new_stream(c10::DeviceIndex device);
c10::DeviceIndex device_of_stream(int64_t stream);

/// Enqueues work named `what`; an error if it uses memory that other streams still use.
void enqueue(int64_t stream, std::string_view what, const std::vector<Accesses*>& reads,
             const std::vector<Accesses*>& writes);
/// Lets `later` happen when the stream gets to where it is now.
void defer(int64_t stream, std::function<void()> later);

/// The host waits for all work of a stream; an error named `what` while it captures.
void wait_for(int64_t stream, std::string_view what);
void wait_for_device(c10::DeviceIndex device);
bool is_idle(int64_t stream);
/// `stream` goes on after what `other` has now.
void join(int64_t stream, int64_t other);

/// Memory given back: a violation if a stream other than its own still uses it, unrecorded.
void check_freed(const Accesses& accesses);

// ---- Events ------------------------------------------------------------------------------------

struct Event {
  Stamp at;
  Clock seen;
  std::uint64_t capture = 0;  ///< that it was recorded in
  int queries = 0;
};
void record(Event& event, int64_t stream);
void block(const Event& event, int64_t stream);
/// Whether the host knows that it has happened: the third time it asks, or after a wait.
bool query(Event& event);
void wait_for(const Event& event);

// ---- Capture -----------------------------------------------------------------------------------

/// From here on `stream`, and each that waits for it, gives its work to `capture`, which must live
/// until it has ended, on the same thread; `only_this_thread`: others may wait for other streams. A
/// capture is invalid once one of its streams has waited, or the host for it. A wait for what is
/// not in the capture is an error, as CUDA has it.
void begin_capture(Capture& capture, int64_t stream, bool only_this_thread = true);
/// Returns why it is invalid, or nothing.
std::string end_capture(Capture& capture);
/// Null if it captures nothing.
Capture* capture_of(int64_t stream);
inline bool is_capturing(int64_t stream) {
  return capture_of(stream) != nullptr;
}
/// Throws as CUDA does if the stream captures, or this thread's capture is under way. What LibTorch
/// alone refuses does not break a capture.
void refuse_in_capture(int64_t stream, std::string_view what, bool breaks_it = true);

// ---- What could not be thrown ------------------------------------------------------------------

/// Wrong uses that were detected in code that cannot throw; each test that leaves some fails (see
/// violations.cpp). Taking them clears them.
std::vector<std::string> take_violations();
void violated(std::string text);

}  // namespace simulated
