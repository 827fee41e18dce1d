// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "format.h"
#include "system.h"

namespace support {

/// One line on a terminal that is rewritten while a run goes on; where the output is no terminal,
/// a plain line for each tenth of the run.
///
///     ProgressBar bar("fp32", steps);
///     for (int64_t step = 1; step <= steps; ++step) {
///       if (bar.is_due(step)) bar.show(step, "loss 0.12");   // so the text is made only when seen
///     }
///
/// A run that goes on from an earlier one begins at `begun` of the steps.
class ProgressBar {
  using Clock = std::chrono::steady_clock;

 public:
  ProgressBar(std::string title, std::int64_t total, std::FILE* out = stdout,
              std::int64_t begun = 0)
      : title_(std::move(title)),
        total_(total),
        begun_(begun),
        shown_(begun),
        out_(out),
        is_terminal_(support::is_terminal(out)) {}

  /// Ends the line, also when an exception ends the run.
  ~ProgressBar() {
    if (line_open_) std::fputc('\n', out_), std::fflush(out_);
  }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Whether `done` of the steps deserve a new line now: the last always, else ten times a second
  /// on a terminal and ten times a run elsewhere.
  bool is_due(std::int64_t done) const {
    if (done >= total_) return true;
    if (!is_terminal_) return done * 10 / total_ != shown_ * 10 / total_;
    return Clock::now() - shown_at_ >= std::chrono::milliseconds(100);
  }

  void show(std::int64_t done, const std::string& status) {
    shown_ = done;
    shown_at_ = Clock::now();
    const double elapsed = std::chrono::duration<double>(shown_at_ - started_at_).count();
    const double left =
        elapsed / static_cast<double>(done - begun_) * static_cast<double>(total_ - done);
    const std::string time =
        done < total_ ? format("%.0f s left", left) : format("%.1f s", elapsed);
    if (is_terminal_) {
      constexpr std::int64_t cells = 24;
      const auto full = static_cast<std::size_t>(done * cells / total_);
      const std::string filled(full, '#'), empty(cells - full, '.');
      std::fprintf(out_, "\r%s [%s%s] %lld/%lld  %s  %s\x1b[K", title_.c_str(), filled.c_str(),
                   empty.c_str(), static_cast<long long>(done), static_cast<long long>(total_),
                   status.c_str(), time.c_str());
      line_open_ = true;
    } else {
      std::fprintf(out_, "%s %lld/%lld  %s  %s\n", title_.c_str(), static_cast<long long>(done),
                   static_cast<long long>(total_), status.c_str(), time.c_str());
    }
    std::fflush(out_);
  }

 private:
  std::string title_;
  std::int64_t total_, begun_;
  std::int64_t shown_;  // how many steps were done when the last line was written
  std::FILE* out_;
  bool is_terminal_;
  bool line_open_ = false;
  Clock::time_point started_at_ = Clock::now();
  Clock::time_point shown_at_ = Clock::now() - std::chrono::hours(1);
};

}  // namespace support
