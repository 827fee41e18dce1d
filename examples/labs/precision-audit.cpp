// SPDX-License-Identifier: BSD-3-Clause
// First a CastRecorder counts the casts of a training step: which ops ran in which dtype, what was
// cast for them, and the memory traffic of these casts. Then a PrecisionAudit measures which ops
// of a model may run in 16 bits, and whether that saves time. Draws each op's error against the
// time saved, and writes a policy file for the next run:
//   precision-audit [FILE.png]
#include <torch/torch.h>
#include <torchamp/labs/cast_recorder.h>
#include <torchamp/labs/precision_audit.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <sstream>
#include <string>

#include "support/check.h"
#include "support/drawing/canvas.h"
#include "support/drawing/png_file.h"
#include "support/drawing/text.h"
#include "support/drawing/ticks.h"
#include "support/format.h"
#include "support/temporary_folder.h"

namespace {

namespace nn = torch::nn;

/// A block with a softmax in the middle: fp32 between two products in bf16.
struct AttentionImpl : nn::Module {
  nn::Linear query{nullptr}, key{nullptr}, value{nullptr};

  AttentionImpl() {
    query = register_module("query", nn::Linear(16, 16));
    key = register_module("key", nn::Linear(16, 16));
    value = register_module("value", nn::Linear(16, 16));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    RECORD_USER_SCOPE("attention");  // names the ops that take no parameter
    const torch::Tensor weights = query(x).mm(key(x).t()).softmax(-1);
    return weights.mm(value(x)) + x;
  }
};
TORCH_MODULE(Attention);

torchamp::CastReport record_step(Attention& model, const torch::Tensor& x,
                                 const torchamp::Policy& policy) {
  model->zero_grad();
  torchamp::CastRecorder recorder(*model);
  torch::Tensor loss;
  {
    torchamp::AutocastGuard autocast(torch::kCPU, {.dtype = torch::kBFloat16, .policy = policy});
    loss = torch::mse_loss(model(x), x);
  }
  loss.backward();
  return recorder.report();
}

void record_casts() {
  Attention model;
  const torch::Tensor x = torch::randn({64, 16});

  const torchamp::CastReport report = record_step(model, x, torchamp::Policy::standard());
  std::cout << report;

  // "undone" counts softmax's result, which was cast from bf16 and is cast back. A softmax with
  // unchanged arguments has neither cast. (The audit below measures whether a model tolerates it.)
  const auto lean = torchamp::Policy::standard().unchanged({"softmax"});
  const torchamp::CastReport leaner = record_step(model, x, lean);
  const auto before = report.total(), after = leaner.total();
  std::cout << "softmax in bf16: " << before.casts << " casts become " << after.casts << ", "
            << before.cast_bytes << " bytes " << after.cast_bytes << ", " << before.undone
            << " undone " << after.undone << '\n';
  std::istringstream json(leaner.to_json());
  std::string line;
  std::getline(std::getline(json, line), line);
  std::cout << "its costliest row as JSON: " << line << '\n';
  support::check(before.undone > after.undone && before.casts > after.casts,
                 "softmax in bf16 saves casts");
  support::check(!at::hasCallbacks(), "without a recorder there is no cost");
}

/// A block of two layers, whose exp() has a wide range.
struct NetImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::log1p((first(x).tanh() * 14.).exp()));
  }
  nn::Linear first = register_module("first", nn::Linear(256, 256));
  nn::Linear last = register_module("last", nn::Linear(256, 256));
};
TORCH_MODULE(Net);

/// A point for each row: error, on a logarithmic axis, over microseconds saved.
void draw(drawing::Canvas& canvas, const torchamp::PrecisionAudit& audit) {
  using namespace drawing;
  const Rect box{92, 52, canvas.width() - 330, canvas.height() - 120};
  double low = 1e300, high = 1e-300, least = 0., most = 0.;
  for (const torchamp::AuditRow& row : audit.rows()) {
    if (row.error > 0. && std::isfinite(row.error)) {
      low = std::min(low, row.error / 2.), high = std::max(high, row.error * 2.);
    }
    least = std::min(least, row.fp32_us - row.low_us);
    most = std::max(most, row.fp32_us - row.low_us);
  }
  draw_text(canvas, box.x, 32, "What lowering an op costs and saves",
            {.height = 17.5, .bold = true});
  draw_text(canvas, box.x + box.width / 2., canvas.height() - 14.,
            "microseconds saved in a step, casts not counted",
            {.color = palette::muted, .align = Align::centre});
  draw_text_upwards(canvas, 26, box.y + box.height / 2., "error, weighed by gradients",
                    {.color = palette::muted, .align = Align::centre});
  const auto to_y = [&](double error) {
    const double height = std::log(std::clamp(error, low, high) / low) / std::log(high / low);
    return box.bottom() - height * box.height;
  };
  const auto to_x = [&](double us) {
    return box.x + (us - least) / std::max(most - least, 1e-9) * box.width;
  };
  for (const Tick& tick : log_ticks(low, high)) {
    if (!tick.is_major()) continue;
    canvas.fill({box.x, static_cast<int>(to_y(tick.value)), box.width, 1}, palette::rule);
    draw_text(canvas, box.x - 10, to_y(tick.value) + 5, tick.label,
              {.height = 11., .align = Align::right});
  }
  for (const Tick& tick : linear_ticks(least, most, 6)) {
    draw_text(canvas, to_x(tick.value), box.bottom() + 24, tick.label,
              {.height = 11., .align = Align::centre});
  }
  canvas.fill({static_cast<int>(to_x(0.)), box.y, 1, box.height}, palette::ink);
  int overflowing = 0;
  for (const torchamp::AuditRow& row : audit.rows()) {
    const bool overflows = !std::isfinite(row.error);
    const double x = to_x(row.fp32_us - row.low_us);
    const double y = overflows ? box.y + 16 * overflowing++ : to_y(row.error);
    canvas.fill({static_cast<int>(x) - 4, static_cast<int>(y) - 4, 9, 9},
                overflows ? palette::orange : palette::blue);
    const std::string label = row.op + (row.module.empty() ? "" : " in " + row.module);
    draw_text(canvas, x + 10, y + 4, label + (overflows ? " (overflows)" : ""), {.height = 11.});
  }
}

void audit_precision(const char* picture) {
  Net model;
  const auto x = torch::randn({256, 256}), target = torch::randn({256, 256});

  torchamp::PrecisionAudit audit(model, {.dtype = torch::kHalf});
  audit.run([&] { torch::mse_loss(model(x), target).backward(); }, 3);
  std::cout << audit;
  support::check(audit.rows().front().op == "exp", "the wide exp() comes first");
  support::check(audit.rows().front().overflow > 0., "it overflows, because fp16 ends at 65504");

  const torchamp::AuditedPolicy chosen = audit.policy();
  std::cout << '\n' << chosen;
  support::check(chosen.error <= chosen.budget, "the error is within the budget");

  const support::TemporaryFolder folder("torchamp");
  const std::string file = (folder.path() / "net.policy").string();
  torchamp::save_policy(chosen, file);
  const torchamp::LoadedPolicies loaded = torchamp::load_policies(file);
  loaded.apply_to(*model);  // the next run
  support::check(loaded.policy.effect("exp", torch::kCPU) == torchamp::Cast::fp32,
                 "exp() stays in fp32");
  torchamp::AutocastGuard autocast(torch::kCPU, {.dtype = torch::kHalf, .policy = loaded.policy});
  support::check(model(x).isfinite().all().item<bool>(), "nothing overflows");

  drawing::Canvas canvas(1000, 620, drawing::palette::paper);
  draw(canvas, audit);
  drawing::write_png(picture, canvas.image());
  std::cout << "see " << picture << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  torch::manual_seed(0);
  record_casts();
  audit_precision(argc > 1 ? argv[1] : "precision-audit.png");
}
