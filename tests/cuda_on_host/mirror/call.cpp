// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/CPUGeneratorImpl.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

#include "cuda_on_host/stand_in.h"
#include "op.h"

namespace mirror {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

std::string first_line(const char* text) {
  const std::string all = text;
  return all.substr(0, all.find('\n'));
}

/// The CPU's default generator, seeded while it lives.
class SeededDefault {
 public:
  explicit SeededDefault(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~SeededDefault() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  SeededDefault(const SeededDefault&) = delete;
  SeededDefault& operator=(const SeededDefault&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

Tensor widened(const Tensor& tensor) {
  const bool is_complex_half = tensor.defined() && tensor.scalar_type() == at::kComplexHalf;
  if (is_complex_half) return tensor.to(at::kComplexFloat);
  return tensor.defined() && is_narrow(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

bool writes_to_out(const Op& op) {
  return op.handle.operator_name().overload_name.find("out") != std::string::npos;
}

}  // namespace

void no_values(const std::string& op, const std::string& why) {
  static std::mutex mutex;
  static auto* const said = new std::set<std::string>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (said->insert(op).second)
    std::fprintf(stderr, "cuda_on_host: %s has no values: %s\n", op.c_str(), why.c_str());
}

const IValue& Arguments::operator[](const std::string& name) const {
  const std::optional<int> index = schema_.argumentIndexWithName(name);
  TORCH_CHECK(index, schema_.name(), " has no argument ", name);
  return values_[static_cast<std::size_t>(*index)];
}

Tensor Arguments::tensor(const std::string& name) const {
  const IValue& value = (*this)[name];
  return value.isTensor() ? value.toTensor() : Tensor();
}

Tensor Arguments::in_fp32(const std::string& name) const {
  return widened(tensor(name));
}

std::vector<Tensor> Arguments::tensors(const std::string& name) const {
  return tensors_of((*this)[name]);
}

std::vector<int64_t> Arguments::ints(const std::string& name) const {
  const IValue& value = (*this)[name];
  return value.isNone() ? std::vector<int64_t>() : value.toIntVector();
}

uint64_t Draw::value() const {
  const auto read = [](const void* memory) {
    uint64_t result = 0;
    std::memcpy(&result, stand_in_alias(memory), sizeof result);
    return result;
  };
  const uint64_t s = captured_seed ? read(captured_seed) : seed;
  const uint64_t p = position + (captured_position ? read(captured_position) : 0);
  return (s * 6364136223846793005U + p * 1442695040888963407U) >> 1;
}

void Call::keep_written() {
  for (Kept& kept : written) kept.bytes.assign(kept.memory, kept.memory + kept.size);
}

void Call::restore_written() const {
  for (const Kept& kept : written) {
    if (!kept.bytes.empty()) std::memcpy(kept.memory, kept.bytes.data(), kept.bytes.size());
  }
}

Stack Call::run_plainly(Stack stack) const {
  std::optional<SeededDefault> seeded;
  if (draw && op_.generator >= 0) {
    stack[static_cast<std::size_t>(op_.generator)] =
        IValue(at::make_generator<at::CPUGeneratorImpl>(draw->value()));
  } else if (draw) {
    seeded.emplace(draw->value());
  }
  if (op_.substitute) return (*op_.substitute)(Arguments(op_.schema(), stack));
  op_.handle.callBoxed(&stack);
  return stack;
}

/// What was written to copies in fp32, or given back by a substitute of an out= overload, goes to
/// the arguments' memory.
void Call::store_written(const Stack& used, const Stack& given) const {
  const bool out = op_.substitute && writes_to_out(op_);
  for (std::size_t i = 0; i < op_.written.size(); ++i) {
    const std::size_t argument = op_.written[i];
    const std::vector<Tensor> to = tensors_of(arguments[argument]);
    const std::vector<Tensor> from = tensors_of(out ? given[i] : used[argument]);
    for (std::size_t j = 0; j < to.size() && j < from.size(); ++j) {
      if (to[j].defined() && from[j].defined() && !to[j].is_same(from[j])) store(to[j], from[j]);
    }
  }
}

Stack Call::run(bool in_fp32) {
  Stack used;
  for (const IValue& argument : arguments)
    used.push_back(in_fp32 ? map_tensors(argument, widened) : argument);
  Stack given = run_plainly(used);
  store_written(used, given);
  for (std::size_t i = 0; i < outputs.size() && i < given.size(); ++i) {
    const std::vector<Tensor> to = tensors_of(outputs[i]), from = tensors_of(given[i]);
    for (std::size_t j = 0; j < to.size() && j < from.size(); ++j) {
      if (!to[j].defined() || !from[j].defined()) continue;
      if (to[j].numel() == 0 || from[j].numel() == 0) continue;  // which only one of them fills
      if (to[j].sizes() == from[j].sizes()) {
        store(to[j], from[j]);
      } else {
        no_values(op_.name + "'s output " + std::to_string(i), "it has another shape on a CPU");
      }
    }
  }
  return given;
}

void Call::compute() noexcept {
  const PlainCalls plain;
  std::string why;
  for (const bool in_fp32 : {false, true}) {
    if (op_.in_fp32 && !in_fp32) continue;
    try {
      restore_written();
      results = run(in_fp32);
      return;
    } catch (const std::exception& error) {
      if (why.empty()) why = first_line(error.what());
    }
  }
  no_values(op_.name, why);
}

}  // namespace mirror
