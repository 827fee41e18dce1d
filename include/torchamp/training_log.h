// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. TrainingStepOptions::log: a file with a line for each step.
///
/// A TrainingStep with `.log = "run.csv"` writes the file. It begins with the line
/// `step,loss,scale,skipped,norm,time`. Each step adds a line: the step's number, the loss (of the
/// window's last micro-batch), the scale, 1 if the step was skipped and otherwise 0, the norm
/// before clipping (empty without max_grad_norm), and the seconds since construction. If the file
/// exists, lines are appended.
///
/// The log does not wait for values on a device: it writes them some steps later, when they have
/// arrived on the host. finish() and the destructor wait for the values that have not yet arrived,
/// and write them. If the file cannot be opened, the constructor of the TrainingStep throws. If a
/// line cannot be written after construction (the disk is full), the log warns, training continues,
/// and a later step writes the missing line.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/training_result.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A CSV file of steps.
class StepLog {
 public:
  explicit StepLog(const std::string& path) : path_(path) {
    text_ = is_empty() ? "step,loss,scale,skipped,norm,time\n" : has_partial_line() ? "\n" : "";
    open();
    TORCH_CHECK(file_ && append(), "TrainingStep: cannot write the log '", path,
                "'. Its folder must exist, and allow you to write.");
  }
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;
  ~StepLog() {
    try {
      flush();
    } catch (...) {  // another call reports a device's failure
    }
  }

  /// Adds the result of a step. Never waits for its values.
  void add(std::int64_t step, const TrainingResult& result) {
    const InternalOps guard;
    Line line{.step = step, .seconds = seconds()};
    const auto& made = result.step_result();
    line.has_gradients = !made || made->had_gradients();
    const std::array<at::Tensor, 4> given{result.loss_tensor(), result.scale_tensor(),
                                          result.found_inf(), result.norm_tensor()};
    std::vector<at::Tensor> numbers;
    at::Device device = at::kCPU;
    for (const at::Tensor& one : given) {
      if (one.defined() && device.is_cpu()) device = one.device();
    }
    const bool has_fp64 = facts_of(device.type()).fp64 == Fp64::yes;
    const auto options = at::TensorOptions(device).dtype(has_fp64 ? at::kDouble : at::kFloat);
    for (std::size_t i = 0; i < given.size(); ++i) {
      line.digits[i] = !given[i].defined() ? 0 : given[i].scalar_type() == at::kDouble ? 17 : 9;
      numbers.push_back(line.digits[i] > 0
                            ? to_device_async(device, given[i].reshape({})).to(options)
                            : at::full({}, i == 1 ? 1. : 0., options));
    }
    const at::Tensor all = at::stack(numbers);
    line.numbers = all;
    if (!device.is_cpu()) {
      line.numbers = copy_target(device, all.sizes(), all.scalar_type());
      line.numbers.copy_(all, /*non_blocking=*/true);
      const c10::impl::VirtualGuardImpl backend(device.type());
      line.arrived.emplace(device.type());
      line.arrived->record(backend.getStream(device));
    }
    lines_.push_back(std::move(line));
    write(/*waits=*/false);
  }

  /// Writes all remaining lines; waits for the device.
  void flush() { write(/*waits=*/true); }

 private:
  struct Line {
    std::int64_t step;
    double seconds;
    bool has_gradients = true;
    std::array<int, 4> digits{};  // of loss, scale, overflow flag, norm; 0: no value
    at::Tensor numbers{};
    std::optional<c10::Event> arrived{};  // of a device
  };

  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  /// Writes the lines whose numbers have arrived, in order; with `waits` it waits for all.
  void write(bool waits) {
    for (; !lines_.empty(); lines_.pop_front()) {
      const Line& line = lines_.front();
      if (line.arrived) {
        if (waits) line.arrived->synchronize();
        if (!line.arrived->query()) break;
      }
      add_text(line);
    }
    if (append()) {
      warned_ = false;
    } else if (!std::exchange(warned_, true)) {
      TORCH_WARN("TrainingStep: cannot write the log '", path_,
                 "'. Training goes on, and later steps write the missing lines. Free some space "
                 "on the disk.");
    }
  }

  void add_text(const Line& line) {
    std::ostringstream text;
    text.imbue(std::locale::classic());  // independent of the program's locale
    const at::Tensor numbers = line.numbers.to(at::kDouble);
    const auto* const values = numbers.const_data_ptr<double>();
    const auto print = [&](std::size_t i) {
      text << std::setprecision(std::max(line.digits[i], 9)) << values[i];
    };
    text << line.step << ',';
    if (line.digits[0] > 0) print(0);
    text << ',';
    print(1);
    text << ',' << (values[2] != 0. || !line.has_gradients) << ',';
    if (line.digits[3] > 0) print(3);
    text << ',' << std::setprecision(9) << line.seconds << '\n';
    text_ += text.str();
  }

  void open() { file_.open(path_, std::ios::app | std::ios::binary); }

  /// Writes the text. If the disk is full, the file is unchanged.
  bool append() {
    if (text_.empty()) return true;
    std::error_code failure;
    const std::uintmax_t before = std::filesystem::file_size(path_, failure);
    if (!file_.is_open()) open();
    if (file_ << text_ << std::flush) {
      text_.clear();
      return true;
    }
    file_.close();
    file_.clear();
    if (!failure) std::filesystem::resize_file(path_, before, failure);
    return false;
  }

  bool is_empty() const {
    std::error_code missing;
    const std::uintmax_t size = std::filesystem::file_size(path_, missing);
    return missing || size == 0;
  }
  /// Whether the last line lacks its end, as after a crash. False for a pipe.
  bool has_partial_line() const {
    std::ifstream file(path_, std::ios::binary);
    return file.seekg(-1, std::ios::end) && file.get() != '\n';
  }

  std::string path_;
  std::ofstream file_;  // closed after a failure
  std::string text_;    // lines that are not written yet
  bool warned_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::deque<Line> lines_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
