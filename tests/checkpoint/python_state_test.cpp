// SPDX-License-Identifier: BSD-3-Clause
// Files that Python wrote (tests/parity/python_checkpoints.{py,txt}), files for Python, and files
// that are neither.
#include <torchamp/python_state.h>

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "support/damaged.h"
#include "support/expect_error.h"
#include "support/linux_only.h"
#include "support/optimizers.h"
#include "support/temporary_folder.h"

#ifdef __linux__
#include <signal.h>
#include <sys/resource.h>
#endif

using torchamp::GradScaler;
using torchamp::GradScalerState;
using torchamp::load_python_state;
using torchamp::save_python_state;

namespace {

std::string from_base64(const std::string& text) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<uint32_t>(digits.find(c));
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xff);
  }
  return bytes;
}

GradScalerState read(const std::string& bytes, const std::string& keys = "-") {
  std::istringstream in(bytes);
  if (keys == "-") return load_python_state(in);
  if (keys == "amp/scaler") return load_python_state(in, {"amp", "scaler"});
  return load_python_state(in, {"loop", "loop", "same"});
}

struct Recorded {
  std::string name, keys, bytes;
  GradScalerState state;  // empty for a foreign file
};

struct Checkpoints {
  std::vector<Recorded> files;
  std::string ours;  // a pickle, in hexadecimal
};

Checkpoints recorded() {
  std::ifstream file("parity/python_checkpoints.txt");
  EXPECT_TRUE(file) << "run in tests/";
  Checkpoints all;
  for (std::string kind; file >> kind;) {
    if (kind == "ours") {
      file >> all.ours;
      continue;
    }
    Recorded one;
    file >> one.name;
    if (kind == "state") {
      GradScalerState& s = one.state;
      file >> one.keys >> s.scale >> s.growth_factor >> s.backoff_factor >> s.growth_interval >>
          s.growth_tracker;
    }
    std::string text;
    file >> text;
    one.bytes = from_base64(text);
    all.files.push_back(one);
  }
  EXPECT_GT(all.files.size(), 15U);
  return all;
}

const GradScalerState kState{1024., 1.7, 0.3, 70000, 12345};

/// In a file of save_python_state().
std::string pickle_of(const GradScalerState& state) {
  std::stringstream file;
  save_python_state(state, file);
  caffe2::serialize::PyTorchStreamReader archive(&file);
  const auto [data, size] = archive.getRecord("data.pkl");
  return {static_cast<const char*>(data.get()), size};
}

std::string pickle_of(const c10::impl::GenericDict& dict) {
  std::string pickle;
  torch::jit::Pickler pickler(
      [&](const char* data, std::size_t size) { pickle.append(data, size); }, nullptr, nullptr,
      nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  return pickle;
}

/// A file as Python's torch.save writes it, with this pickle.
std::string file_of(const std::string& pickle) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("byteorder", "little", 6);
  archive.writeEndOfFile();
  return bytes;
}

}  // namespace

TEST(GradScalerFile, ReadsWhatPythonWrote) {
  for (const Recorded& one : recorded().files) {
    if (one.state.empty()) continue;
    SCOPED_TRACE(one.name);
    EXPECT_EQ(read(one.bytes, one.keys), one.state);
    GradScaler scaler;
    scaler.load_state_dict(read(one.bytes, one.keys));
    EXPECT_EQ(scaler.state_dict(), one.state);
  }
}

TEST(GradScalerFile, RefusesWhatElsePythonWrites) {
  const std::map<std::string, std::string> errors{
      {"disabled", "the file is an empty dict, as the state of a disabled GradScaler is"},
      {"tensor", "the file is not a dict"},
      {"list", "the file is not a dict"},
      {"model", "the file has no \"scale\". It is not the state_dict of a GradScaler"},
      {"whole_scaler", "the file is not a dict"},
      {"legacy", "Pass what torch.save(scaler.state_dict(), path) has written"},
      {"bare_pickle", "Pass what torch.save(scaler.state_dict(), path) has written"},
      {"incomplete", "the file has no \"_growth_tracker\""},
      {"text_for_number", "the file[\"scale\"] is not a number"},
      {"float_for_int", "the file[\"growth_interval\"] is not a whole number"},
      {"tensor_for_number", "the file[\"scale\"] is not a number"},
  };
  std::size_t seen = 0;
  for (const Recorded& one : recorded().files) {
    if (!one.state.empty()) continue;
    SCOPED_TRACE(one.name);
    ++seen;
    EXPECT_ERROR(read(one.bytes), "torchamp::load_python_state: ");
    EXPECT_ERROR(read(one.bytes), errors.at(one.name));
  }
  EXPECT_EQ(seen, errors.size());
}

TEST(GradScalerFile, NamesTheEntriesIfAKeyIsMissing) {
  for (const Recorded& one : recorded().files) {
    if (one.keys != "amp/scaler") continue;
    std::istringstream in(one.bytes);
    EXPECT_ERROR(load_python_state(in, {"scaler"}),
                 "the file has no entry \"scaler\". It has: model, optimizer, epoch, best, amp,");
    EXPECT_ERROR(load_python_state(in, {"amp", "dtype", "x"}),
                 "the file[\"amp\"][\"dtype\"] is not a dict");
  }
}

TEST(GradScalerFile, ShowsTheBeginningOfNamesThatAreLongOrMany) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (int i = 0; i < 100; ++i) dict.insert(std::to_string(i) + std::string(5000, 'x'), i);
  std::istringstream in(file_of(pickle_of(dict)));
  try {
    (void)load_python_state(in, {"scaler"});
    ADD_FAILURE() << "loaded";
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    EXPECT_NE(what.find("It has: 0xxx"), std::string::npos) << what;
    EXPECT_NE(what.find("xxx..., and 80 more."), std::string::npos) << what;
    EXPECT_LT(what.size(), 4000u);
  }
}

TEST(GradScalerFile, WritesThePickleThatPythonReads) {
  std::ostringstream hex;
  for (const char byte : pickle_of(kState)) {
    hex << "0123456789abcdef"[(byte >> 4) & 15] << "0123456789abcdef"[byte & 15];
  }
  EXPECT_EQ(hex.str(), recorded().ours);
}

TEST(GradScalerFile, WritesWhatLibTorchsOwnReaderReads) {
  std::ostringstream out;
  save_python_state(kState, out);
  const std::string bytes = out.str();
  const c10::IValue value = torch::jit::pickle_load({bytes.begin(), bytes.end()});
  const auto dict = value.toGenericDict();
  EXPECT_EQ(dict.size(), 5U);
  EXPECT_EQ(dict.at("scale").toDouble(), kState.scale);
  EXPECT_EQ(dict.at("growth_factor").toDouble(), kState.growth_factor);
  EXPECT_EQ(dict.at("backoff_factor").toDouble(), kState.backoff_factor);
  EXPECT_EQ(dict.at("growth_interval").toInt(), kState.growth_interval);
  EXPECT_EQ(dict.at("_growth_tracker").toInt(), kState.growth_tracker);
}

TEST(GradScalerFile, GoesToAFileAndBack) {
  const std::string path = (std::filesystem::temp_directory_path() /
                            c10::str("torchamp_grad_scaler_", std::random_device()(), ".pt"))
                               .string();
  for (const GradScalerState& state :
       {kState, GradScalerState{0x1p-126, 3., 0.1, 1, -1},
        GradScalerState{0x1p127, 2., 0.5, int64_t{1} << 31, (int64_t{1} << 31) - 1}}) {
    save_python_state(state, path);
    EXPECT_EQ(load_python_state(path), state);
  }
  save_python_state(GradScaler({.enabled = false}).state_dict(), path);
  EXPECT_ERROR(load_python_state(path), "an empty dict");
  std::filesystem::remove(path);
  EXPECT_ERROR(load_python_state(path),
               "'" + path + "': it cannot be opened: No such file or directory.");
  std::filesystem::create_directories(path + "/x");
  EXPECT_ERROR(load_python_state(path), "'" + path + "': it is not a file.");
  EXPECT_ERROR(save_python_state(kState, path),
               "torchamp::save_python_state: '" + path + "' exists and is not a file.");
  std::filesystem::remove_all(path);
  EXPECT_ERROR(save_python_state(kState, path + "/x"),
               "torchamp::save_python_state: there is no folder '" + path + "'. Create it first.");
}

TEST(GradScalerFile, SaysSoIfWritingFails) {
  struct Full : std::streambuf {
    std::streamsize xsputn(const char*, std::streamsize size) override {
      return (left -= size) < 0 ? 0 : size;
    }
    int overflow(int) override { return EOF; }
    std::streamsize left = 0;
  };
  for (const std::streamsize room : {0, 10, 100, 500, 900}) {
    Full full;
    full.left = room;
    std::ostream out(&full);
    errno = ENOENT;  // of another call
    EXPECT_ERROR(save_python_state(kState, out),
                 "torchamp::save_python_state: writing has failed: the stream refuses it.");
  }
}

TEST(GradScalerFile, SaysThatTheStreamHasNoFile) {
  const TemporaryFolder folder;
  std::ifstream none(folder / "none.pt", std::ios::binary);
  EXPECT_ERROR(torchamp::load_python_state(none),
               "torchamp::load_python_state: the stream has failed; its file may not be there.");
}

TEST(GradScalerFile, SaysSoIfTheStreamsFailuresAreExceptions) {
  struct Throwing : std::streambuf {
    std::streamsize xsputn(const char*, std::streamsize) override {
      throw std::runtime_error("the disk is gone");
    }
  };
  Throwing full;
  std::ostream out(&full);
  out.exceptions(std::ios::badbit | std::ios::failbit);
  EXPECT_ERROR(save_python_state(kState, out),
               "torchamp::save_python_state: writing has failed: the disk is gone.");
  std::ostringstream whole;
  save_python_state(kState, whole);
  for (const std::string& bytes : {whole.str(), whole.str().substr(0, 300), std::string()}) {
    std::istringstream in(bytes);
    in.exceptions(std::ios::badbit | std::ios::failbit | std::ios::eofbit);
    if (bytes == whole.str()) {
      EXPECT_EQ(load_python_state(in), kState);
    } else {
      EXPECT_ERROR(load_python_state(in), "torchamp::load_python_state: it is damaged");
    }
  }
}

TEST(GradScalerFile, NamesTheFileThatIsDamaged) {
  const TemporaryFolder folder;
  const std::string path = (folder / "scaler.pt").string();
  std::ofstream(path) << "nonsense";
  EXPECT_ERROR(load_python_state(path),
               "torchamp::load_python_state: '" + path + "': it is damaged: it is no zip file");
}

TEST(GradScalerFile, LeavesTheOldFileAndNothingElseIfWritingFails) {
#ifdef __linux__
  const TemporaryFolder folder;
  const std::string path = (folder / "scaler.pt").string();
  save_python_state(kState, path);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  const auto old = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_ERROR(save_python_state(GradScaler().state_dict(), path),
               "torchamp::save_python_state: cannot write '" + path + ".partial-");
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, old);
  EXPECT_EQ(load_python_state(path), kState);
  EXPECT_EQ(folder.files(), 1);
#else
  SKIP_WITHOUT_LINUX();
#endif
}

TEST(GradScalerFile, RefusesAWholeNumberThatADoubleDoesNotHold) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("scale", (int64_t{1} << 53) + 1);
  dict.insert("growth_factor", 2);
  dict.insert("backoff_factor", 0.5);
  dict.insert("growth_interval", 1);
  dict.insert("_growth_tracker", 0);
  EXPECT_ERROR(read(file_of(pickle_of(dict))),
               "the file[\"scale\"] is 9007199254740993, which a double does not hold.");
}

// ---- Damage -------------------------------------------------------------------------------------

namespace {

/// Runs `load` on damaged copies of `whole`: an error or a state within its limits, and after an
/// error everything as before. Gives the number of errors.
template <typename Load>
int fuzz(const std::string& whole, int times, const Load& load) {
  std::mt19937 random(7);
  GradScaler scaler({.init_scale = 2048.});
  const GradScalerState before = scaler.state_dict();
  int errors = 0;
  for (int i = 0; i < times && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(i);
    const std::string bytes = damaged(whole, random);
    try {
      load(scaler, bytes);
      EXPECT_TRUE(std::isfinite(scaler.get_scale()) && scaler.get_scale() > 0);
      scaler.load_state_dict(before);
    } catch (const std::exception&) {
      ++errors;
      EXPECT_EQ(scaler.state_dict(), before);
    }
  }
  return errors;
}

}  // namespace

TEST(GradScalerFile, SurvivesDamagedPickles) {
  for (const Recorded& one : recorded().files) {
    if (one.state.empty()) continue;
    SCOPED_TRACE(one.name);
    std::istringstream in(one.bytes);
    caffe2::serialize::PyTorchStreamReader archive(&in);
    const auto [data, size] = archive.getRecord("data.pkl");
    const std::string pickle(static_cast<const char*>(data.get()), size);
    const int errors = fuzz(pickle, 2000, [&](GradScaler& scaler, const std::string& bytes) {
      scaler.load_state_dict(read(file_of(bytes)));
    });
    EXPECT_GT(errors, 100);
  }
  std::mt19937 random(8);
  for (int i = 0; i < 5000; ++i) {
    std::string noise(1 + random() % 60, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_THROW(read(file_of(noise)), c10::Error);
  }
}

TEST(GradScalerFile, SurvivesDamagedArchives) {
  const std::string whole = recorded().files.front().bytes;
  const int errors = fuzz(whole, 1000, [](GradScaler& scaler, const std::string& bytes) {
    scaler.load_state_dict(read(bytes));
  });
  EXPECT_GT(errors, 300);
  for (std::size_t length = 0; length < whole.size(); length += 7) {
    EXPECT_ERROR(read(whole.substr(0, length)), "torchamp::load_python_state: ");
  }
}

namespace {

/// 1000 copies with one flipped bit, changed byte, range of zeros or cut, outside of padding.
void expect_damage_to_be_seen(const std::string& whole, const std::string& keys) {
  std::mt19937 random(11);
  const auto padding = padding_of(whole);
  for (int i = 0; i < 1000 && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_ERROR(read(damaged_once(whole, padding, random), keys),
                 "load_python_state: it is damaged");
  }
  EXPECT_NO_THROW(read(whole, keys));
}

}  // namespace

TEST(GradScalerFile, DetectsAnyDamageButToPadding) {
  for (const Recorded& one : recorded().files) {
    if (one.state.empty()) continue;
    SCOPED_TRACE(one.name);
    expect_damage_to_be_seen(one.bytes, one.keys);
  }
  std::ostringstream out;
  save_python_state(kState, out);
  expect_damage_to_be_seen(out.str(), "-");
}

TEST(GradScalerFile, DetectsAFlipOfAnyBitButOfPadding) {
  std::ostringstream out;
  save_python_state(kState, out);
  const std::string whole = out.str();
  const auto padding = padding_of(whole);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8 && !padding[at]; ++bit) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << bit);
      SCOPED_TRACE(std::to_string(at) + " " + std::to_string(bit));
      EXPECT_ERROR(read(bytes), "torchamp::load_python_state: it is damaged");
    }
  }
}

TEST(GradScalerFile, ReadsAFileWithoutCrcs) {
  const std::string dict = pickle_of(kState);
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, std::size_t size) {
        bytes.append(static_cast<const char*>(data), size);
        return size;
      },
      /*compute_crc32=*/false);
  writer.writeRecord("data.pkl", dict.data(), dict.size());
  writer.writeRecord("data/0", dict.data(), dict.size(), /*compress=*/true);
  writer.writeEndOfFile();
  EXPECT_EQ(read(bytes), kState);
  EXPECT_ERROR(read(bytes.substr(0, bytes.size() - 30)), "it is damaged");
}

TEST(GradScalerFile, SurvivesDamagedArchivesOfOurs) {
  GradScaler saved({.init_scale = 4096.});
  saved.load_state_dict(kState);
  std::ostringstream out;
  torch::save(saved, out);
  const int errors = fuzz(out.str(), 1000, [](GradScaler& scaler, const std::string& bytes) {
    std::istringstream in(bytes);
    torch::load(scaler, in);
    EXPECT_EQ(scaler.state_dict(), kState) << "what loads is what was saved";
  });
  EXPECT_GT(errors, 300);
}
