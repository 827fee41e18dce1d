// SPDX-License-Identifier: BSD-3-Clause
// The gates of the architecture: a layer of the core includes only the layers below it, no two
// topics include each other, and only tests in tests/internals/ name internals. These tests read
// text, so they need no platform and take no time. There are no exceptions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/temporary_folder.h"

namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

// ---- Layers and topics --------------------------------------------------------------------------

/// The folders of detail/core/, from the lowest layer up.
constexpr std::string_view core_layers[] = {"base",   "runtime",     "products",
                                            "policy", "autocast",    "gradients",
                                            "optim",  "check_order", "scaler"};
/// It includes all of the core and nothing above it.
constexpr std::string_view whole_core = "torchamp.h";

/// The topic of the public headers whose path below torchamp/ begins with `begins`. The longest
/// `begins` decides. Other public headers have the topic of the public header that exports them.
struct PublicHeaders {
  std::string_view begins;
  std::string_view topic;
};
constexpr PublicHeaders public_headers[] = {
    {"version.h", "base"},
    {"cpu_products.h", "products"},
    {"ops.h", "policy"},
    {"policy.h", "policy"},
    {"autocast.h", "autocast"},
    {"autocast_state.h", "autocast"},
    {"cast_cache.h", "autocast"},
    {"missing_gradients.h", "gradients"},
    {"scaled_step.h", "gradients"},
    {"optim.h", "optim"},
    {"clip_grad.h", "scaler"},
    {"grad_scaler.h", "scaler"},
    {"grad_scaler_options.h", "scaler"},
    // the extras
    {"accumulat", "accumulation"},
    {"distributed/", "distributed"},
    {"cuda_graph.h", "graph"},
    {"python_state.h", "io"},
    {"training_checkpoint.h", "io"},
    {"master_weights.h", "masters"},
    {"custom_function.h", "modules"},
    {"non_finite_op.h", "observe"},
    {"overflow_report.h", "observe"},
    {"policy_text.h", "policy_text"},
    {"recompute.h", "recompute"},
    {"training_", "training"},
    {"weight_cache.h", "weights"},
    {"closure_step.h", "closure_step"},
    {"lr_scheduler.h", "lr_scheduler"},
    {"split_for_muon.h", "split_for_muon"},
    // labs
    {"labs/precision_audit.h", "audit"},
    {"labs/fp8", "fp8"},
    {"labs/module_policy.h", "modules"},
    {"labs/cast_recorder.h", "observe"},
    {"labs/underflow_meter.h", "observe"},
    {"labs/policy_file.h", "policy_file"},
    {"labs/weights_together.h", "weights"},
};

// ---- Reading ------------------------------------------------------------------------------------

fs::path root() {
  return TORCHAMP_TEST_ROOT;
}

std::size_t lines_of(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

/// The texts of torchamp's headers, by path below torchamp/.
const std::map<std::string, std::string>& headers() {
  static const auto all = [] {
    std::map<std::string, std::string> texts;
    const fs::path include = root() / "include" / "torchamp";
    for (const auto& entry : fs::recursive_directory_iterator(include)) {
      if (entry.path().extension() != ".h") continue;
      texts[fs::relative(entry.path(), include).generic_string()] = content_of(entry.path());
    }
    return texts;
  }();
  return all;
}

/// What the first group of `pattern` matches in each line of a text.
Names matches(const std::string& text, const std::string& pattern) {
  Names found;
  const std::regex regex(pattern, std::regex::multiline);
  for (auto at = std::sregex_iterator(text.begin(), text.end(), regex);
       at != std::sregex_iterator(); ++at) {
    found.insert((*at)[1]);
  }
  return found;
}

const Names& includes_of(const std::string& header) {
  static const auto all = [] {
    std::map<std::string, Names> names;
    for (const auto& [name, text] : headers()) {
      names[name] = matches(text, R"(^#include "torchamp/([^"]+)\")");
    }
    return names;
  }();
  return all.at(header);
}

/// All that `header` brings, itself included.
Names brought_by(const std::string& header) {
  Names brought;
  std::vector<std::string> next{header};
  while (!next.empty()) {
    const std::string now = std::move(next.back());
    next.pop_back();
    if (!brought.insert(now).second) continue;
    for (const std::string& included : includes_of(now)) next.push_back(included);
  }
  return brought;
}

/// The public headers that export another public header, by the exported header.
const std::map<std::string, std::string>& exporters() {
  static const auto all = [] {
    std::map<std::string, std::string> names;
    for (const auto& [name, text] : headers()) {
      if (name.find("detail/") != name.npos) continue;
      const std::string line = R"(^#include "torchamp/([^"]+)\" +// IWYU pragma: export)";
      for (const std::string& exported : matches(text, line)) names[exported] = name;
    }
    return names;
  }();
  return all;
}

/// "policy" of "detail/core/policy/rules.h", and of "policy.h"; empty of an unknown public header.
std::string topic_of(std::string_view header) {
  for (const std::string_view folder : {"detail/core/", "detail/extras/", "labs/detail/"}) {
    if (!header.starts_with(folder)) continue;
    const std::string_view rest = header.substr(folder.size());
    return std::string(rest.substr(0, rest.find('/')));
  }
  PublicHeaders best{};
  for (const PublicHeaders& one : public_headers) {
    if (header.starts_with(one.begins) && one.begins.size() > best.begins.size()) best = one;
  }
  if (!best.topic.empty()) return std::string(best.topic);
  const auto exporter = exporters().find(std::string(header));
  return exporter == exporters().end() ? "" : topic_of(exporter->second);
}

/// The index of the header's layer; the number of layers for an extra.
std::size_t layer_of(std::string_view header) {
  const std::string topic(topic_of(header));
  const auto* const found = std::find(std::begin(core_layers), std::end(core_layers), topic);
  return static_cast<std::size_t>(found - std::begin(core_layers));
}

bool is_core(std::string_view header) {
  return header == whole_core || layer_of(header) < std::size(core_layers);
}

bool is_labs(std::string_view header) {
  return header.starts_with("labs/");
}

/// Whether the header includes several topics, and so belongs to none.
bool is_umbrella(std::string_view header) {
  return header == whole_core || header == "compiled.h";
}

// ---- Code without comments
// -----------------------------------------------------------------------

/// Where the comment, directive, string or character ends that begins at `at`; `at` if none does.
std::size_t end_of_no_code(const std::string& text, std::size_t at) {
  const auto is = [&](std::string_view what) { return text.compare(at, what.size(), what) == 0; };
  const auto past = [&](std::string_view what) {
    return std::min(text.find(what, at + 1), text.size() - what.size()) + what.size();
  };
  const bool begins_line = text.find_last_not_of(' ', at - 1) == text.rfind('\n', at - 1);
  if (is("//")) return past("\n") - 1;
  if (is("/*")) return past("*/");
  if (is("R\"(")) return past(")\"");
  std::size_t end = at + 1;
  if (is("#") && begins_line) {
    while (end < text.size() && (text[end] != '\n' || text[end - 1] == '\\')) ++end;
    return end;
  }
  const bool is_character = is("'") && std::isalnum(static_cast<unsigned char>(text[at - 1])) == 0;
  if (!is("\"") && !is_character) return at;
  for (; end < text.size() && text[end] != text[at]; ++end) end += text[end] == '\\' ? 1 : 0;
  return end + 1;
}

/// The text without comments, directives, strings and characters; line numbers are unchanged.
std::string code_of(const std::string& header) {
  const std::string text = '\n' + header;
  std::string code;
  for (std::size_t at = 1; at < text.size();) {
    const std::size_t end = end_of_no_code(text, at);
    code.append(lines_of(text.substr(at, end - at)), '\n');
    if (end == at) code += text[at];
    at = std::max(end, at + 1);
  }
  return code;
}

// ---- The gates ----------------------------------------------------------------------------------

TEST(House, HasATopicForEveryHeaderAndAHeaderForEveryInclude) {
  for (const auto& [name, text] : headers()) {
    EXPECT_TRUE(is_umbrella(name) || !topic_of(name).empty()) << name << " has no topic here";
    if (name.starts_with("detail/core/")) {
      EXPECT_TRUE(is_core(name)) << name << " is in no layer";
    }
    for (const std::string& included : includes_of(name)) {
      EXPECT_TRUE(headers().contains(included)) << name << " includes " << included;
    }
  }
  for (const PublicHeaders& one : public_headers) {
    const bool any = std::any_of(headers().begin(), headers().end(), [&](const auto& header) {
      return header.first.starts_with(one.begins);
    });
    EXPECT_TRUE(any) << "no header begins with " << one.begins;
  }
}

// In GCC, `namespace torchamp::detail` is in the version's namespace. In Clang it is beside it.
TEST(House, EveryHeaderOpensTheNamespaceOfTheVersion) {
  for (const auto& [name, text] : headers()) {
    EXPECT_THAT(matches(text, R"((namespace torchamp[ :]))"), testing::IsEmpty()) << name;
  }
}

// Without version.h, TORCHAMP_NAMESPACE would be the name of a namespace.
TEST(House, EveryHeaderIncludesTheVersionWhoseNamespaceItOpens) {
  for (const auto& [name, text] : headers()) {
    if (name.ends_with("-inl.h") ||
        text.find("namespace TORCHAMP_NAMESPACE") == std::string::npos) {
      continue;
    }
    EXPECT_TRUE(brought_by(name).contains("version.h")) << name;
  }
}

TEST(House, NoHeaderOfTheCoreIncludesAHigherLayer) {
  Names upward;
  for (const auto& [name, text] : headers()) {
    if (!is_core(name)) continue;
    for (const std::string& included : includes_of(name)) {
      const bool is_up =
          name == whole_core ? !is_core(included) : layer_of(included) > layer_of(name);
      if (is_up) upward.insert(name + " -> " + included);
    }
  }
  EXPECT_THAT(upward, testing::IsEmpty());
}

TEST(House, NoHeaderOutsideLabsIncludesLabs) {
  Names outside;
  for (const auto& [name, text] : headers()) {
    if (is_labs(name)) continue;
    for (const std::string& included : includes_of(name)) {
      if (is_labs(included)) outside.insert(name + " -> " + included);
    }
  }
  EXPECT_THAT(outside, testing::IsEmpty());
}

TEST(House, EveryPublicHeaderSaysItsTierFirst) {
  for (const auto& [name, text] : headers()) {
    if (name.find("detail/") != name.npos) continue;
    const std::string tier = is_labs(name)                        ? "Labs"
                             : is_core(name) || is_umbrella(name) ? "Core"
                                                                  : "Extra";
    const Names briefs = matches(text, R"(^/// @brief (\w+)\. )");
    EXPECT_THAT(briefs, testing::ElementsAre(tier)) << name;
  }
}

TEST(House, NoTwoTopicsIncludeOrDeclareWhatIsInEachOther) {
  std::map<std::string, Names> topics_of_type;
  for (const auto& [name, text] : headers()) {
    for (const std::string& type :
         matches(text, R"(^(?:template <.*> )?(?:class|struct) (\w+)[^;{()]*\{)")) {
      topics_of_type[type].insert(topic_of(name));
    }
  }
  std::map<std::string, Names> needs;  // topics, by topic
  for (const auto& [name, text] : headers()) {
    if (is_umbrella(name)) continue;
    Names& topics = needs[topic_of(name)];
    for (const std::string& included : includes_of(name)) topics.insert(topic_of(included));
    for (const std::string& type : matches(text, R"(^(?:class|struct) (\w+);)")) {
      const Names& defined_in = topics_of_type[type];
      if (!defined_in.contains(topic_of(name))) topics.insert(defined_in.begin(), defined_in.end());
    }
  }
  Names mutual;
  for (const auto& [topic, others] : needs) {
    for (const std::string& other : others) {
      if (topic < other && needs[other].contains(topic)) mutual.insert(topic + ", " + other);
    }
  }
  EXPECT_THAT(mutual, testing::IsEmpty());
}

// The list of kernels is used for error texts and archives, and to compile the optimizers once.
TEST(House, EveryFusedOptimizerIsInTheListOfKernels) {
  const auto& texts = headers();
  const Names used =
      matches(texts.at("optim.h"), R"(^using Fused\w+ = FusedOptimizerOf<detail::(\w+)>;)");
  EXPECT_FALSE(used.empty());
  EXPECT_EQ(used, matches(texts.at("detail/core/optim/kernels.h"), R"(\bf\((\w+)\))"));
}

TEST(House, EveryFusedOptimizerHasTests) {
  std::string tests = content_of(root() / "tests" / "support" / "optimizer_kinds.h");
  for (const auto& entry : fs::directory_iterator(root() / "tests" / "optim")) {
    tests += content_of(entry.path());
  }
  const Names tested = matches(tests, R"(torchamp::(Fused\w+))");
  for (const std::string& name : matches(headers().at("optim.h"), R"(^using (Fused\w+) = )")) {
    EXPECT_TRUE(tested.contains(name))
        << name << " is not in the kinds of optimizer_kinds.h, and has no test in tests/optim/";
  }
}

// A reader looks for a Note by its title, so a title stands in one line, once as a title.
TEST(House, EveryNoteThatIsReferredToIsFoundByItsTitle) {
  static const std::regex title(R"(\s*//+ Note \[([^\]]*)\])"), reference(R"(Note \[([^\]]*)\])"),
      broken(R"(\bNote( \[[^\]]*)?$)");
  std::map<std::string, int> titles;
  std::map<std::string, std::string> referred;  // title: by which header
  for (const auto& [name, text] : headers()) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.find("Note") == line.npos) continue;  // quick, unlike a regular expression
      EXPECT_FALSE(std::regex_search(line, broken)) << name << ": " << line;
      std::smatch found;
      if (std::regex_match(line, found, title)) {
        ++titles[found[1]];
        continue;
      }
      for (std::sregex_iterator one(line.begin(), line.end(), reference), end; one != end; ++one) {
        referred.emplace((*one)[1], name);
      }
    }
  }
  EXPECT_GT(referred.size(), 20U);
  for (const auto& [note, name] : referred) EXPECT_EQ(titles[note], 1) << note << ", in " << name;
  for (const auto& [note, count] : titles) EXPECT_EQ(count, 1) << note;
}

TEST(House, TheCoreThrowsByTorchampsMacrosOnly) {
  static const std::regex other(R"(\bTORCH_CHECK(_VALUE)?\(|\bfail(_value)?\(\{|\bthrow [^;])");
  for (const auto& [name, text] : headers()) {
    if (!is_core(name) || name == "detail/core/base/text.h") continue;
    std::smatch found;
    const std::string code = code_of(text);
    EXPECT_FALSE(std::regex_search(code, found, other)) << name << " has " << found.str();
  }
}

TEST(House, ATrainingStepBringsNoGraphsAndNoProcesses) {
  Names beyond = brought_by("training_step.h");
  for (const std::string& header : brought_by(std::string(whole_core))) beyond.erase(header);
  for (const std::string& header : beyond) {
    EXPECT_FALSE(header.starts_with("distributed/") || header.find("graph") != header.npos)
        << header;
  }
}

/// Whether a text names torchamp::detail, by an alias or `using namespace torchamp` as well.
bool names_internals(const std::string& text) {
  for (std::size_t at = 0; (at = text.find("detail", at)) != text.npos; ++at) {
    const std::string_view before(text.data(), at);
    if (before.ends_with("torchamp::")) return true;
    const char last = before.empty() ? ' ' : before.back();
    const bool is_qualified = last == ':',
               ends_word = last == '_' || std::isalnum(static_cast<unsigned char>(last)) != 0;
    if (!is_qualified && !ends_word && text.compare(at, 8, "detail::") == 0) return true;
  }
  return false;
}

TEST(House, FindsInternalsUnderAnyName) {
  EXPECT_TRUE(names_internals("torchamp::detail::Masters& held = masters;"));
  EXPECT_TRUE(names_internals("namespace internals = torchamp::detail;"));
  EXPECT_TRUE(names_internals("using namespace torchamp;\ndetail::Masters& held = masters;"));
  EXPECT_FALSE(names_internals("c10d::detail::Store store;  // a detail: see my_detail::Store"));
}

TEST(House, InternalsAreNamedByTestsOfInternalsOnly) {
  Names naming;
  const fs::path tests = root() / "tests";
  for (const auto& entry : fs::recursive_directory_iterator(tests)) {
    const std::string path = fs::relative(entry.path(), tests).generic_string();
    if (!path.ends_with("_test.cpp") || path.starts_with("internals/") ||
        path == "headers/house_test.cpp") {
      continue;
    }
    const std::string text = content_of(entry.path());
    if (names_internals(text) || text.find("torchamp/detail/") != text.npos) naming.insert(path);
  }
  EXPECT_THAT(naming, testing::IsEmpty());
}

}  // namespace
