// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. TrainingStepOptions::log: a file with a line for each step.
///
/// With this header a TrainingStep takes `.log = "run.csv"`. The file begins with the line
/// `step,loss,scale,skips,norm,time`. Each step adds a line: its number, the loss (of the window's
/// last micro-batch), its scale, the number of skipped steps so far, the norm before clipping
/// (empty without max_grad_norm), and the seconds since construction. An existing file is appended
/// to. A device's values are written some steps later, when they have arrived on the host, so
/// nothing waits for them; finish() and the destructor write the rest.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <fstream>
#include <locale>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/training/parts.h"
#include "torchamp/training_result.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// A CSV file of steps.
class CsvStepLog final : public StepLog {
 public:
  explicit CsvStepLog(const std::string& path) : path_(path), file_(path, std::ios::app) {
    TORCH_CHECK(file_, "TrainingStep: cannot write the log '", path, "'.");
    file_.imbue(std::locale::classic());  // whatever the program's is
    if (file_.tellp() == 0) file_ << "step,loss,scale,skips,norm,time\n";
    file_.precision(9);
  }
  ~CsvStepLog() override {
    try {
      flush();
    } catch (...) {  // a device's failure is reported elsewhere
    }
  }

  void add(std::int64_t step, const TrainingResult& result) override {
    const InternalOps guard;
    Line line{.step = step, .seconds = seconds()};
    const std::array<at::Tensor, 4> given{result.loss_tensor(), result.scale_tensor(),
                                          result.found_inf(), result.norm_tensor()};
    std::vector<at::Tensor> numbers;
    at::Device device = at::kCPU;
    for (const at::Tensor& one : given) {
      if (one.defined() && device.is_cpu()) device = one.device();
    }
    for (std::size_t i = 0; i < given.size(); ++i) {
      line.has[i] = given[i].defined();
      const auto options = at::TensorOptions(device).dtype(at::kFloat);
      numbers.push_back(line.has[i] ? to_device_async(device, given[i].reshape({}).to(at::kFloat))
                                    : at::full({}, i == 1 ? 1. : 0., options));
    }
    const at::Tensor all = at::stack(numbers);
    line.numbers = all;
    if (!device.is_cpu()) {
      line.numbers = copy_target(device, all.sizes());
      line.numbers.copy_(all, /*non_blocking=*/true);
      const c10::impl::VirtualGuardImpl backend(device.type());
      line.arrived.emplace(device.type());
      line.arrived->record(backend.getStream(device));
    }
    lines_.push_back(std::move(line));
    write(/*waits=*/false);
  }

  void flush() override {
    write(/*waits=*/true);
    TORCH_CHECK(file_, "TrainingStep: cannot write the log '", path_, "'.");
  }

 private:
  struct Line {
    std::int64_t step;
    double seconds;
    std::array<bool, 4> has{};  // of loss, scale, overflow flag, norm
    at::Tensor numbers{};
    std::optional<c10::Event> arrived{};  // of a device
  };

  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  /// The lines whose numbers have arrived, in order; `waits`: all.
  void write(bool waits) {
    for (; !lines_.empty(); lines_.pop_front()) {
      const Line& line = lines_.front();
      if (line.arrived) {
        if (waits) line.arrived->synchronize();
        if (!line.arrived->query()) return;
      }
      const auto* const numbers = line.numbers.const_data_ptr<float>();
      if (numbers[2] != 0.F) ++skips_;
      file_ << line.step << ',';
      if (line.has[0]) file_ << numbers[0];
      file_ << ',' << numbers[1] << ',' << skips_ << ',';
      if (line.has[3]) file_ << numbers[3];
      file_ << ',' << line.seconds << std::endl;  // flushes whole lines for readers
    }
  }

  std::string path_;
  std::ofstream file_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::deque<Line> lines_;
  std::int64_t skips_ = 0;
};

template <>
struct StepLogOf<TrainingResult> {
  static std::unique_ptr<StepLog> make(const std::string& path) {
    return std::make_unique<CsvStepLog>(path);
  }
};

}  // namespace torchamp::detail
