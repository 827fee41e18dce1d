// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/graph.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "simulated_device/counts.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#endif

namespace simulated {

Graph::~Graph() {
  if (capture_) {
    end_capture(*capture_);
    capture_ = nullptr;
    violated("a graph was destroyed in the middle of its capture, whose stream captures on");
  }
  reset();
}

void Graph::begin(bool only_this_thread) {
  TORCH_CHECK(!capture_ && !recorded_, "simulated device: this graph has been captured already");
  const c10::Device device = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice();
  const int64_t stream = current_stream(device.index());
  TORCH_CHECK(stream >= device_count,
              "simulated device: graphs must be captured on a non-default stream.");
  auto capture = std::make_unique<Capture>(device.index());
  begin_capture(*capture, stream, only_this_thread);
  capture_ = std::move(capture);
  pool_ = capture_->pool();
  device_ = device.index();
}

void Graph::end() {
  TORCH_CHECK(capture_, "simulated device: nothing is captured");
  const std::string fault = end_capture(*capture_);
  work_ = capture_->take_work();
  capture_ = nullptr;
  TORCH_CHECK(fault.empty(), "simulated device: ", fault);
  recorded_ = true;
}

void Graph::replay() {
  TORCH_CHECK(recorded_, "simulated device: replay of a graph without a capture");
  const c10::DeviceGuard guard({c10::kPrivateUse1, device_});
  const int64_t stream = current_stream(device_);
  refuse_in_capture(stream, "replay of a graph");
  const auto block = [](const Place& place, const Work& work) {
    Block* const found = find_block(place.base, place.serial);
    TORCH_CHECK(found, "simulated device: ", work.what,
                " in a graph uses memory that was freed after the capture, or in it");
    return found;
  };
  for (const Work& work : work_) {
    for (const Place& place : work.reads) block(place, work);
    for (const Place& place : work.writes) block(place, work);
  }
  count(&Totals::graph_launches);
  for (const Work& work : work_) {
    std::vector<Accesses*> reads, writes;
    for (const Place& place : work.reads) reads.push_back(&block(place, work)->accesses);
    for (const Place& place : work.writes) writes.push_back(&block(place, work)->accesses);
    enqueue(stream, work.what, reads, writes);
    work.run(stream);
  }
}

void Graph::reset() {
  if (capture_) return;  // CUDA's streams go on capturing, too
  work_.clear();
  recorded_ = false;
  if (pool_) release_pool(*pool_);
  pool_ = nullptr;
}

Capturing::Capturing(c10::Stream stream) : capture_(stream.device_index()) {
  begin_capture(capture_, stream.id());
}

Capturing::~Capturing() {
  end_capture(capture_);
  release_pool(*capture_.pool());
}

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace {

class RegisteredGraph final : public at::GraphImplInterface {
 public:
  explicit RegisteredGraph(const at::GraphImplArgs&) {}
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode mode) override {
    graph_.begin(mode == at::GraphCaptureMode::ThreadLocal);
  }
  void capture_end() override { graph_.end(); }
  void instantiate() override {}
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Graph graph_;
};

}  // namespace
#endif

}  // namespace simulated

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace at {
REGISTER_GRAPH_IMPL(SIM, simulated::RegisteredGraph)
}  // namespace at
#endif
