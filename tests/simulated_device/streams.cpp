// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "simulated_device/capture.h"
#include "simulated_device/counts.h"
#include "simulated_device/memory.h"

namespace simulated {

namespace {

struct Deferred {
  std::uint64_t after;
  std::function<void()> run;
};

struct StreamState {
  explicit StreamState(c10::DeviceIndex on) : device(on) {}

  c10::DeviceIndex device;
  std::uint64_t count = 0;
  Clock seen;  // of other streams
  std::deque<Deferred> deferred;
  Capture* capture = nullptr;
};

/// A capture under way, or one that has ended.
struct CaptureState {
  int64_t origin;
  std::string fault;
  bool restricts_all_threads;
};

struct Streams {
  std::recursive_mutex mutex;
  std::vector<StreamState> all{StreamState(0), StreamState(1)};
  Clock host;  // what some thread of the host has waited for
  std::vector<std::string> violations;
  std::map<std::uint64_t, CaptureState> captures;  // under way, by their numbers

  StreamState& operator[](int64_t stream) { return all.at(static_cast<std::size_t>(stream)); }
};
Streams& streams() {
  static Streams* const s = new Streams;  // outlives every tensor
  return *s;
}

thread_local std::array<int64_t, device_count> current{0, 1};
thread_local int captures_of_this_thread = 0;

void raise(Clock& clock, const Clock& to) {
  for (const auto& [stream, count] : to) clock[stream] = std::max(clock[stream], count);
}

bool knows(const Clock& clock, Stamp stamp) {
  const auto found = clock.find(stamp.stream);
  return stamp.stream < 0 || (found != clock.end() && found->second >= stamp.count);
}

/// What a stream has seen: its own past too.
Clock seen_by(Streams& s, int64_t stream) {
  Clock clock = s[stream].seen;
  clock[stream] = s[stream].count;
  return clock;
}

void run_deferred(StreamState& stream, std::uint64_t up_to) {
  while (!stream.deferred.empty() && stream.deferred.front().after <= up_to) {
    const std::function<void()> run = std::move(stream.deferred.front().run);
    stream.deferred.pop_front();
    run();
  }
}

/// `stream` waits for work of a capture, or of none (0).
void join_capture(Streams& s, int64_t stream, std::uint64_t other) {
  Capture*& own = s[stream].capture;
  if ((own ? own->id() : 0) == other) return;
  const auto found = s.captures.find(other);
  TORCH_CHECK(!own, "simulated device: dependency created on uncaptured work in another stream");
  TORCH_CHECK(found != s.captures.end(),
              "simulated device: operation not permitted on an event last recorded in a capturing "
              "stream");
  own = s[found->second.origin].capture;
}

/// The host has waited for everything in `clock`.
void host_waited(Streams& s, const Clock& clock) {
  raise(s.host, clock);
  for (const auto& [stream, count] : clock) run_deferred(s[stream], count);
}

}  // namespace

int64_t current_stream(c10::DeviceIndex device) {
  return current.at(static_cast<std::size_t>(device));
}

int64_t exchange_stream(c10::DeviceIndex device, int64_t stream) {
  return std::exchange(current.at(static_cast<std::size_t>(device)), stream);
}

int64_t new_stream(c10::DeviceIndex device) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  s.all.emplace_back(device);
  return static_cast<int64_t>(s.all.size()) - 1;
}

c10::DeviceIndex device_of_stream(int64_t stream) {
  const std::lock_guard lock(streams().mutex);
  return streams()[stream].device;
}

void enqueue(int64_t stream, std::string_view what, const std::vector<Accesses*>& reads,
             const std::vector<Accesses*>& writes) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  StreamState& own = s[stream];
  raise(own.seen, s.host);  // launched by a host that had waited
  const auto check = [&](Stamp stamp, const char* verb) {
    TORCH_CHECK(stamp.stream == stream || knows(own.seen, stamp), "simulated device: ", what,
                " on stream ", stream, " uses memory that stream ", stamp.stream, " still ", verb,
                ". Let it wait for an event.");
  };
  for (const Accesses* const a : reads) check(a->written, "writes");
  for (const Accesses* const a : writes) {
    check(a->written, "writes");
    for (const Stamp& stamp : a->read) check(stamp, "reads");
  }
  const Stamp stamp{stream, ++own.count};
  for (Accesses* const a : reads) {
    std::erase_if(a->read, [&](const Stamp& r) { return r.stream == stream; });
    a->read.push_back(stamp);
  }
  for (Accesses* const a : writes) {
    a->written = stamp;
    a->read.clear();
  }
  if (own.count > host_runs_ahead) run_deferred(own, own.count - host_runs_ahead);
}

void defer(int64_t stream, std::function<void()> later) {
  const std::lock_guard lock(streams().mutex);
  StreamState& own = streams()[stream];
  own.deferred.push_back({own.count, std::move(later)});
}

void wait_for(int64_t stream, std::string_view what) {
  refuse_in_capture(stream, what);
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  count(&Totals::waits);
  host_waited(s, seen_by(s, stream));
}

void wait_for_device(c10::DeviceIndex device) {
  refuse_in_capture(current_stream(device), "synchronizeDevice");
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  count(&Totals::waits);
  for (std::size_t i = 0; i < s.all.size(); ++i) {
    if (s.all[i].device == device) host_waited(s, seen_by(s, static_cast<int64_t>(i)));
  }
}

bool is_idle(int64_t stream) {
  refuse_in_capture(stream, "queryStream");
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  return knows(s.host, {stream, s[stream].count});
}

void join(int64_t stream, int64_t other) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  join_capture(s, stream, s[other].capture ? s[other].capture->id() : 0);
  raise(s[stream].seen, seen_by(s, other));
}

void check_freed(const Accesses& accesses) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  const Clock own = seen_by(s, accesses.home);
  const auto check = [&](const Stamp& stamp) {
    if (knows(own, stamp) || knows(s.host, stamp) || accesses.recorded.contains(stamp.stream)) {
      return;
    }
    violated("memory of stream " + std::to_string(accesses.home) + " was freed while stream " +
             std::to_string(stamp.stream) + " may still use it: record_stream was not called");
  };
  check(accesses.written);
  for (const Stamp& stamp : accesses.read) check(stamp);
}

void record(Event& event, int64_t stream) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  event.at = {stream, s[stream].count};
  event.seen = seen_by(s, stream);
  event.queries = 0;
  event.capture = s[stream].capture ? s[stream].capture->id() : 0;
}

void block(const Event& event, int64_t stream) {
  if (event.at.stream < 0) return;
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  join_capture(s, stream, event.capture);
  raise(s[stream].seen, event.seen);
}

bool query(Event& event) {
  if (event.at.stream < 0) return true;
  refuse_in_capture(event.at.stream, "queryEvent");
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  if (!knows(s.host, event.at) && ++event.queries < 3) return false;
  host_waited(s, event.seen);
  return true;
}

void wait_for(const Event& event) {
  if (event.at.stream < 0) return;
  refuse_in_capture(event.at.stream, "synchronizeEvent");
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  count(&Totals::waits);
  host_waited(s, event.seen);
}

void begin_capture(Capture& capture, int64_t stream, bool only_this_thread) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  TORCH_CHECK(!s[stream].capture, "simulated device: stream ", stream, " captures already");
  s[stream].capture = &capture;
  s.captures[capture.id()] = {stream, "", !only_this_thread};
  ++captures_of_this_thread;
}

std::string end_capture(Capture& capture) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  const CaptureState state = s.captures.at(capture.id());
  s.captures.erase(capture.id());
  --captures_of_this_thread;
  std::string fault = state.fault;
  const Clock seen = seen_by(s, state.origin);
  for (std::size_t i = 0; i < s.all.size(); ++i) {
    if (s.all[i].capture != &capture) continue;
    s.all[i].capture = nullptr;
    if (!knows(seen, {static_cast<int64_t>(i), s.all[i].count}) && fault.empty()) {
      fault = "capturing stream has unjoined work";
    }
  }
  return fault;
}

Capture* capture_of(int64_t stream) {
  const std::lock_guard lock(streams().mutex);
  return streams()[stream].capture;
}

void refuse_in_capture(int64_t stream, std::string_view what, bool breaks_it) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  const Capture* const capture = s[stream].capture;
  if (capture && breaks_it) {
    s.captures.at(capture->id()).fault = "operation failed due to a previous error during capture";
  }
  const bool all = std::any_of(s.captures.begin(), s.captures.end(), [](const auto& under_way) {
    return under_way.second.restricts_all_threads;
  });
  TORCH_CHECK(captures_of_this_thread == 0 && !capture && !all, "simulated device: ", what,
              ": operation not permitted when stream is capturing");
}

std::vector<std::string> take_violations() {
  const std::lock_guard lock(streams().mutex);
  return std::exchange(streams().violations, {});
}

void violated(std::string text) {
  const std::lock_guard lock(streams().mutex);
  streams().violations.push_back(std::move(text));
}

}  // namespace simulated
