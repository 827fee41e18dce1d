// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <sstream>

#include "torchamp/detail/atomic_file.h"
#include "torchamp/detail/module_archive.h"
#include "torchamp/detail/rng_state.h"
#include "torchamp/training_checkpoint.h"

namespace torchamp {

// Note [The file of a TrainingCheckpoint]
// A LibTorch archive with "torchamp_checkpoint", the version of this layout; "id", a random number;
// "shared", an archive with one archive for each object that was added; "processes"; and
// "local_0", "local_1", …, each an archive of its own as bytes, with the random states under "rng"
// and one archive for each object that was added as local.

namespace detail {

inline constexpr std::int64_t training_checkpoint_version = 1;

/// LibTorch writes an archive with a key such as "class", and then cannot read it.
inline std::string archive_key(const std::string& name) {
  return "object:" + name;
}

inline at::Tensor bytes_of(torch::serialize::OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string text = std::move(stream).str();
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

inline torch::serialize::InputArchive archive_of(const at::Tensor& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return archive;
}

}  // namespace detail

inline void TrainingCheckpoint::add_entry(std::vector<Entry>& entries, Entry entry) const {
  for (const auto* list : {&shared_, &local_}) {
    for (const Entry& other : *list) {
      TORCH_CHECK_VALUE(other.name != entry.name, "TrainingCheckpoint::add: there is a '",
                        entry.name, "' already. Give each object a name of its own.");
    }
  }
  entries.push_back(std::move(entry));
}

/// LibTorch takes the bytes of a file for the dtype of the model that it loads.
inline void TrainingCheckpoint::check_module(const torch::nn::Module& module,
                                             torch::serialize::InputArchive& archive) {
  detail::read_module(
      module, archive, [](const std::string& name, const at::Tensor& to, const at::Tensor& from) {
        if (!from.defined()) return;
        TORCH_CHECK(from.sizes() == to.sizes() && from.dtype() == to.dtype(), "'", name, "' is ",
                    from.dtype(), ' ', from.sizes(), " in the file and ", to.dtype(), ' ',
                    to.sizes(), " in the model");
      });
}

inline void TrainingCheckpoint::write(torch::serialize::OutputArchive& archive,
                                      const std::vector<Entry>& entries) const {
  for (const Entry& entry : entries) {
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    entry.save(nested);
    archive.write(detail::archive_key(entry.name), nested);
  }
}

inline void TrainingCheckpoint::read(torch::serialize::InputArchive& archive,
                                     const std::vector<Entry>& entries) const {
  for (const Entry& entry : entries) {
    torch::serialize::InputArchive nested;
    TORCH_CHECK(archive.try_read(detail::archive_key(entry.name), nested),
                "TrainingCheckpoint::load: '", path_.string(), "' holds no '", entry.name,
                "'. Add what was added when it was saved.");
    try {
      entry.load(nested);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "TrainingCheckpoint::load: '", entry.name, "' in '", path_.string(),
                  "' does not fit: ", error.what_without_backtrace());
    }
  }
}

inline at::Tensor TrainingCheckpoint::bytes_of(const std::vector<Entry>& entries) const {
  torch::serialize::OutputArchive archive;
  write(archive, entries);
  return detail::bytes_of(archive);
}

inline at::Tensor TrainingCheckpoint::local_part() const {
  torch::serialize::OutputArchive archive, rng(archive.compilation_unit());
  const at::NoGradGuard no_grad;
  for (const auto& [device, state] : detail::RngState::now().by_device()) rng.write(device, state);
  archive.write("rng", rng);
  write(archive, local_);
  return detail::bytes_of(archive);
}

inline void TrainingCheckpoint::save(const std::vector<at::Tensor>& local_parts) const {
  const at::NoGradGuard no_grad;
  std::random_device random;
  const std::int64_t id = (static_cast<std::int64_t>(random()) << 31) ^ random();
  torch::serialize::OutputArchive archive, shared(archive.compilation_unit());
  archive.write("torchamp_checkpoint", c10::IValue(detail::training_checkpoint_version));
  archive.write("id", c10::IValue(id));
  archive.write("processes", c10::IValue(static_cast<std::int64_t>(local_parts.size())));
  write(shared, shared_);
  archive.write("shared", shared);
  for (std::size_t rank = 0; rank < local_parts.size(); ++rank) {
    archive.write("local_" + std::to_string(rank), local_parts[rank], /*is_buffer=*/true);
  }
  detail::AtomicFile file(path_);
  archive.save_to([&file](const void* data, std::size_t size) { return file.write(data, size); });
  file.commit();
  file_id_ = id;
}

inline bool TrainingCheckpoint::load() {
  return load(0, 1);
}

inline bool TrainingCheckpoint::load(std::int64_t rank, std::int64_t processes) {
  return load_parts([&](torch::serialize::InputArchive& archive) {
    c10::IValue saved;
    archive.read("processes", saved);
    TORCH_CHECK(saved.toInt() == processes, "TrainingCheckpoint::load: '", path_.string(),
                "' was saved by ", saved.toInt(), " process(es), and this run has ", processes,
                ". Go on with as many, or call load_shared().");
    at::Tensor part;
    archive.read("local_" + std::to_string(rank), part, /*is_buffer=*/true);
    return part;
  });
}

inline bool TrainingCheckpoint::load_shared() {
  return load_parts([](torch::serialize::InputArchive&) { return at::Tensor(); });
}

inline bool TrainingCheckpoint::load_parts(
    const std::function<at::Tensor(torch::serialize::InputArchive&)>& local_part) {
  if (!exists()) return false;
  const at::NoGradGuard no_grad;
  torch::serialize::InputArchive archive, shared, local, rng;
  c10::IValue version, id;
  try {
    archive.load_from(path_.string());
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "TrainingCheckpoint::load: '", path_.string(),
                "' is damaged, or no such file: ", error.what_without_backtrace());
  }
  TORCH_CHECK(archive.try_read("torchamp_checkpoint", version) && archive.try_read("id", id) &&
                  archive.try_read("shared", shared),
              "TrainingCheckpoint::load: '", path_.string(),
              "' was not written by TrainingCheckpoint::save.");
  TORCH_CHECK(version.toInt() == detail::training_checkpoint_version, "TrainingCheckpoint::load: '",
              path_.string(), "' is of version ", version.toInt(),
              ", and this torchamp reads version ", detail::training_checkpoint_version, ".");

  std::optional<detail::RngState> random;
  const at::Tensor part = local_part(archive);
  if (part.defined()) {
    local = detail::archive_of(part.cpu());
    local.read("rng", rng);
    std::map<std::string, at::Tensor> states;
    for (const std::string& device : rng.keys()) {
      at::Tensor state;
      rng.read(device, state);
      states.emplace(device, state.cpu());
    }
    random = detail::RngState::from(states);
  }

  // To go back to, where an object does not fit.
  const at::Tensor shared_before = bytes_of(shared_), local_before = bytes_of(local_);
  try {
    read(shared, shared_);
    if (part.defined()) read(local, local_);
  } catch (...) {
    auto shared_back = detail::archive_of(shared_before),
         local_back = detail::archive_of(local_before);
    read(shared_back, shared_);
    read(local_back, local_);
    throw;
  }
  if (random) random->apply();
  file_id_ = id.toInt();
  return true;
}

}  // namespace torchamp
