// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/in_memory_adapter.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <system_error>

#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/extras/io/archive_file.h"
#include "torchamp/detail/extras/shared/rng_state.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/training_checkpoint.h"

namespace TORCHAMP_NAMESPACE {

// Note [The file of a TrainingCheckpoint]
// A LibTorch archive with "torchamp_checkpoint", the version of this layout; "id", a random number;
// "shared", an archive with one archive per added object; "processes"; and "local_0", "local_1", …,
// each an archive as bytes, with the random states under "rng" and one archive per object of
// add_local(). It is sealed, see Note [Sealed archives]; files of version 1 are not.

namespace detail {

inline constexpr int64_t training_checkpoint_version = 2;

/// LibTorch writes, but cannot read, an archive with a key such as "class".
inline std::string archive_key(const std::string& name) {
  return "object:" + name;
}

/// Runs `body`; its exceptions become c10::Errors that begin with where().
template <class Where, class Body>
void rethrow_with(const Where& where, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, where(), reason_of(error));
  }
}

}  // namespace detail

/// A scheduler's optimizer cannot be queried from LibTorch. It is in the checkpoint if an added
/// optimizer has the scheduler's rates.
TORCHAMP_BODY void TrainingCheckpoint::check_schedulers(const char* call) const {
  std::set<std::vector<double>> known;
  for (const Entry& entry : entries_) {
    if (entry.is_own) return;
    if (entry.rates) known.insert(entry.rates());
  }
  for (const Entry& entry : entries_) {
    TORCH_CHECK(!entry.scheduled_rates || known.contains(entry.scheduled_rates()), call, ": '",
                entry.name,
                "' sets the learning rates of an optimizer that is not in the checkpoint, so a "
                "resumed run would have other rates. Add the optimizer, too.");
  }
}

/// For an optimizer, sharded or not.
TORCHAMP_BODY void TrainingCheckpoint::fill(Entry& entry, torch::optim::Optimizer& optimizer) {
  static constexpr const char *save = "TrainingCheckpoint::save",
                              *load = "TrainingCheckpoint::load";
  entry.save = [&optimizer](torch::serialize::OutputArchive& archive) {
    const auto shards = detail::stored_shards_of(optimizer, save);
    shards ? shards->save(optimizer, archive) : detail::save_optimizer(optimizer, archive);
  };
  entry.load = [&optimizer](torch::serialize::InputArchive& archive, int64_t) {
    const auto shards = detail::stored_shards_of(optimizer, load);
    shards ? shards->load(optimizer, archive) : detail::load_optimizer(optimizer, archive);
  };
  entry.gather = [&optimizer] {
    const auto shards = detail::stored_shards_of(optimizer, save);
    if (shards) shards->gather(optimizer);
  };
  entry.keep = [&optimizer]() -> std::function<void()> {
    if (!detail::shards_of(optimizer, load)) return {};
    torch::serialize::OutputArchive own;
    detail::save_optimizer(optimizer, own);
    return [&optimizer, bytes = detail::bytes_of(own)] {
      auto before = detail::archive_of(bytes);
      detail::load_optimizer(optimizer, before);
    };
  };
  entry.hold = [&optimizer] { return detail::hold_optimizer(optimizer); };
  entry.rates = [&optimizer] { return detail::rates_of(optimizer); };
  entry.discard = [&optimizer](GradScaler& scaler) { scaler.discard(optimizer); };
}

TORCHAMP_BODY void TrainingCheckpoint::add_entry(Entry entry) {
  TORCH_CHECK_VALUE(
      entry.name.find_first_of("\"\\\n") == std::string::npos,
      "TrainingCheckpoint::add: the name '", entry.name,
      "' could be saved but not loaded by LibTorch. Use no quote, backslash or line end.");
  for (const Entry& other : entries_) {
    TORCH_CHECK_VALUE(other.name != entry.name, "TrainingCheckpoint::add: there is a '", entry.name,
                      "' already. Give each object a unique name.");
  }
  entries_.push_back(std::move(entry));
}

/// LibTorch interprets a file's bytes in the dtype of the model that it loads.
TORCHAMP_BODY void TrainingCheckpoint::load_module(torch::nn::Module& module,
                                                   torch::serialize::InputArchive& archive) {
  std::vector<std::string> missing;
  const auto left = detail::read_module(
      module, archive, [&](const std::string& name, const at::Tensor& to, const at::Tensor& from) {
        if (!from.defined()) {
          if (to.defined()) missing.push_back(name);
          return;
        }
        TORCH_CHECK(from.sizes() == to.sizes() && from.dtype() == to.dtype(), "'", name, "' is ",
                    from.dtype(), ' ', from.sizes(), " in the file and ", to.dtype(), ' ',
                    to.sizes(), " in the model");
      });
  TORCH_CHECK(left.empty(),
              "it has entries that the program's model lacks: ", detail::list_of(left));
  detail::WeightsInPlace weights(module);
  try {
    module.load(archive);
  } catch (const std::exception&) {
    TORCH_CHECK(missing.empty(),
                "it lacks entries of the program's model: ", detail::list_of(missing));
    throw;
  }
  weights.take_back();
}

TORCHAMP_BODY void TrainingCheckpoint::write(torch::serialize::OutputArchive& archive,
                                             bool local) const {
  for (const Entry& entry : entries_) {
    if (entry.is_local != local) continue;
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    detail::rethrow_with(
        [&] { return "TrainingCheckpoint::save: '" + entry.name + "' cannot be saved: "; },
        [&] { entry.save(nested); });
    archive.write(detail::archive_key(entry.name), nested);
  }
}

/// Adds a function to `undo` that restores the entry's present value.
TORCHAMP_BODY void TrainingCheckpoint::load_entry(const Entry& entry,
                                                  torch::serialize::InputArchive& archive,
                                                  int64_t version, Undo& undo) {
  if (std::function<void()> back = entry.keep ? entry.keep() : nullptr) {
    undo.push_back(std::move(back));
    entry.load(archive, version);
    return;
  }
  torch::serialize::OutputArchive now;
  detail::rethrow_with([] { return std::string("what is here now could not be kept: "); },
                       [&] { entry.save(now); });
  undo.push_back([&entry, bytes = detail::bytes_of(now),
                  held = entry.hold ? entry.hold() : std::function<void()>()] {
    try {
      auto before = detail::archive_of(bytes);
      entry.load(before, detail::training_checkpoint_version);
    } catch (...) {
      if (!held) throw;
      held();
    }
  });
  entry.load(archive, version);
}

TORCHAMP_BODY void TrainingCheckpoint::read(torch::serialize::InputArchive& archive, bool local,
                                            int64_t version, Undo& undo) const {
  for (const Entry& entry : entries_) {
    if (entry.is_local != local) continue;
    torch::serialize::InputArchive nested;
    TORCH_CHECK(archive.try_read(detail::archive_key(entry.name), nested),
                "TrainingCheckpoint::load: '", path_.string(), "' holds no '", entry.name, "'. ",
                is_of_step(entry.name)
                    ? "It was saved by a TrainingStep without this part: give the "
                      "TrainingStep the options that it had then (.scheduler, .masters). "
                      "Read a TrainingCheckpoint's file by a TrainingCheckpoint."
                    : "Add the same objects as when it was saved.");
    detail::rethrow_with(
        [&] {
          return c10::str("TrainingCheckpoint::load: '", entry.name, "' in '", path_.string(),
                          "' does not fit: ");
        },
        [&] { load_entry(entry, nested, version, undo); });
  }
}

TORCHAMP_BODY at::Tensor TrainingCheckpoint::local_part() const {
  for (const Entry& entry : entries_) {
    if (entry.gather && !entry.is_local) entry.gather();
  }
  torch::serialize::OutputArchive archive, rng(archive.compilation_unit());
  const at::NoGradGuard no_grad;
  for (const auto& [device, state] : detail::RngState::now().by_device()) rng.write(device, state);
  archive.write("rng", rng);
  write(archive, /*local=*/true);
  return detail::bytes_of(archive);
}

TORCHAMP_BODY void TrainingCheckpoint::save(const std::vector<at::Tensor>& local_parts) const {
  for (const Step& step : steps_) step.check("TrainingCheckpoint::save");
  check_schedulers("TrainingCheckpoint::save");
  TORCH_CHECK_VALUE(!local_parts.empty(),
                    "TrainingCheckpoint::save: the list of local parts is empty; such a file could "
                    "not be loaded. Pass the local_part() of each process.");
  for (const at::Tensor& part : local_parts) {
    TORCH_CHECK_VALUE(part.defined() && part.scalar_type() == at::kByte && part.dim() == 1,
                      "TrainingCheckpoint::save: local part ", &part - local_parts.data(),
                      " is not a result of local_part(), a vector of bytes.");
  }
  const at::NoGradGuard no_grad;
  std::random_device random;
  const int64_t id = (static_cast<int64_t>(random()) << 31) ^ random();
  torch::serialize::OutputArchive archive, shared(archive.compilation_unit());
  archive.write("torchamp_checkpoint", c10::IValue(detail::training_checkpoint_version));
  archive.write("id", c10::IValue(id));
  archive.write("processes", c10::IValue(static_cast<int64_t>(local_parts.size())));
  write(shared, /*local=*/false);
  archive.write("shared", shared);
  for (std::size_t rank = 0; rank < local_parts.size(); ++rank) {
    archive.write("local_" + std::to_string(rank), local_parts[rank], /*is_buffer=*/true);
  }
  detail::AtomicFile file(path_, "TrainingCheckpoint::save");
  detail::SealedWriter sealed(
      [&file](const void* data, std::size_t size) { file.write(data, size); });
  archive.save_to([&sealed](const void* data, std::size_t size) {
    sealed.add(data, size);
    return size;
  });
  sealed.finish();
  file.commit();
  file_id_ = id;
}

/// Whether an object of that name may belong to a TrainingStep.
TORCHAMP_BODY bool TrainingCheckpoint::is_of_step(const std::string& name) const {
  return std::ranges::any_of(steps_,
                             [&](const Step& step) { return name.starts_with(step.prefix); });
}

TORCHAMP_BODY bool TrainingCheckpoint::has(std::string_view name) const {
  return std::ranges::any_of(entries_, [&](const Entry& entry) { return entry.name == name; });
}

/// Checks schedulers: a learning rate is in the optimizer's part of the file, and would stay
/// constant without its scheduler.
TORCHAMP_BODY void TrainingCheckpoint::check_entries_of_step(
    torch::serialize::InputArchive& shared) const {
  for (const Step& step : steps_) {
    torch::serialize::InputArchive unread;
    const std::string name = step.prefix + "scheduler";
    TORCH_CHECK(has(name) || !shared.try_read(detail::archive_key(name), unread),
                "it was saved with a scheduler, and this TrainingStep has none, so the learning "
                "rate would stay constant. Set .scheduler as when it was saved.");
  }
}

TORCHAMP_BODY bool TrainingCheckpoint::exists() const {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path_, error);
  TORCH_CHECK(status.type() != std::filesystem::file_type::none,
              "TrainingCheckpoint: cannot determine whether '", path_.string(),
              "' exists: ", error.message(), '.');
  return std::filesystem::exists(status);
}

namespace detail {

/// The open file of a TrainingCheckpoint.
struct CheckpointFile {
  torch::serialize::InputArchive archive{}, shared{};
  int64_t version = 0, id = 0;
};

/// Throws if the file is damaged, or is no file of a TrainingCheckpoint.
inline CheckpointFile open_checkpoint(const std::shared_ptr<FileReader>& file) {
  CheckpointFile opened;
  check_archive(file);
  opened.archive.load_from(
      [&](uint64_t at, void* to, std::size_t n) { return file->read(at, to, n); },
      [&] { return file->size(); }, device_for(file));
  c10::IValue version, id;
  TORCH_CHECK(opened.archive.try_read("torchamp_checkpoint", version) && version.isInt() &&
                  opened.archive.try_read("id", id) && id.isInt() &&
                  opened.archive.try_read("shared", opened.shared),
              "it was not written by TrainingCheckpoint::save.");
  TORCH_CHECK(version.toInt() >= 1 && version.toInt() <= training_checkpoint_version,
              "it is of version ", version.toInt(), ", and this torchamp reads versions 1 to ",
              training_checkpoint_version, ".");
  TORCH_CHECK(version.toInt() == 1 || is_sealed(file), "it is damaged: its checksum is missing.");
  opened.version = version.toInt();
  opened.id = id.toInt();
  return opened;
}

/// Opens the part that process `rank` of `processes` has written, and returns its random states.
inline RngState open_local_part(CheckpointFile& from, int64_t rank, int64_t processes,
                                torch::serialize::InputArchive& local) {
  c10::IValue saved;
  from.archive.read("processes", saved);
  TORCH_CHECK(saved.toInt() == processes, "it was saved by ", saved.toInt(),
              " process(es), and this run has ", processes,
              ". Resume with as many, or call load_shared().");
  at::Tensor part;
  from.archive.read("local_" + std::to_string(rank), part, /*is_buffer=*/true);
  const at::Tensor bytes = part.cpu();
  local = archive_of(bytes, device_for(std::make_shared<caffe2::serialize::MemoryReadAdapter>(
                                bytes.const_data_ptr(), bytes.numel())));
  torch::serialize::InputArchive rng;
  local.read("rng", rng);
  std::map<std::string, at::Tensor> states;
  for (const std::string& device : rng.keys()) {
    at::Tensor state;
    rng.read(device, state);
    states.emplace(device, state.cpu());
  }
  return RngState::from(states);
}

}  // namespace detail

/// Clears the scalers' records of this iteration, because the gradients belong to the old weights.
TORCHAMP_BODY void TrainingCheckpoint::begin_iterations() const {
  for (const Entry& of_scaler : entries_) {
    if (of_scaler.scaler == nullptr) continue;
    for (const Entry& entry : entries_) {
      if (entry.discard) entry.discard(*of_scaler.scaler);
    }
  }
}

/// With the local part of process `rank`, if it is given.
TORCHAMP_BODY bool TrainingCheckpoint::load_parts(std::optional<int64_t> rank, int64_t processes) {
  for (const Step& step : steps_) step.check("TrainingCheckpoint::load");
  check_schedulers("TrainingCheckpoint::load");
  if (!exists()) return false;
  const at::NoGradGuard no_grad;
  detail::CheckpointFile opened;
  torch::serialize::InputArchive local;
  std::optional<detail::RngState> random;
  const auto where = [&] { return "TrainingCheckpoint::load: '" + path_.string() + "': "; };
  detail::rethrow_with(where, [&] {
    opened = detail::open_checkpoint(std::make_shared<detail::FileReader>(path_));
    check_entries_of_step(opened.shared);
    if (rank) random = detail::open_local_part(opened, *rank, processes, local);
  });

  Undo undo;
  const detail::DropWeightCasts drop_weight_casts;
  const auto random_before = detail::RngState::now();
  try {
    read(opened.shared, /*local=*/false, opened.version, undo);
    if (random) {
      read(local, /*local=*/true, opened.version, undo);
      detail::rethrow_with(where, [&] { random->apply(); });
    }
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) {
      try {
        undo.back()();
      } catch (...) {  // restore the others; the first error is thrown
      }
    }
    random_before.apply();
    throw;
  }
  begin_iterations();
  file_id_ = opened.id;
  return true;
}

}  // namespace TORCHAMP_NAMESPACE
