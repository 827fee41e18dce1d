// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/io/zip_check.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Reading a pickle]
//
// A Python checkpoint is a program for a small stack machine. Only dicts with text keys and numbers
// matter here. Every other result (tensors, lists, objects of any class) becomes one opaque value:
// nothing is imported, called or loaded. Values are in a table and refer to each other by index, so
// neither cycles nor deep nesting in a hostile file do harm; there is at most one value per byte.

/// Protocols 2 to 5, as torch.save writes them. Throws c10::Error for anything else.
class PickleReader {
 public:
  enum class Kind : uint8_t { opaque, integer, number, text, dict, mark, dict_type };
  using Index = std::size_t;
  struct Value {
    Kind kind = Kind::opaque;
    int64_t integer = 0;
    double number = 0.;
    std::string_view text{};
    std::vector<std::pair<std::string_view, Index>> entries{};  // the last of equal keys counts
  };

  /// Reads all of `bytes`, which must outlive this.
  explicit PickleReader(std::string_view bytes) : bytes_(bytes) {
    while (!stopped_) run(static_cast<uint8_t>(take(1)[0]));
    root_ = pop();
  }

  const Value& root() const { return values_[root_]; }

  /// The entry of a dict; null if it has none.
  const Value* find(const Value& dict, std::string_view key) const {
    const Value* found = nullptr;
    for (const auto& [name, index] : dict.entries) {
      if (name == key) found = &values_[index];
    }
    return found;
  }

 private:
  [[noreturn]] static void fail(const char* what) {
    TORCH_CHECK(false, "the pickle is damaged: ", what, '.');
  }

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - position_) fail("it ends too early");
    const std::string_view part = bytes_.substr(position_, count);
    position_ += count;
    return part;
  }
  uint64_t unsigned_of(std::size_t width) { return little_endian(take(width)); }
  std::string_view line() {
    const std::size_t end = bytes_.find('\n', position_);
    if (end == std::string_view::npos) fail("a name does not end");
    const std::string_view text = take(end - position_);
    take(1);
    return text;
  }

  void push(Value value) {
    stack_.push_back(values_.size());
    values_.push_back(std::move(value));
  }
  void push_text(uint64_t length) { push({.kind = Kind::text, .text = take(length)}); }
  void push_class(std::string_view module, std::string_view name) {
    const bool makes_dicts = module == "collections" && name == "OrderedDict";
    push({.kind = makes_dicts ? Kind::dict_type : Kind::opaque});
  }
  void push_integer(int64_t value) { push({.kind = Kind::integer, .integer = value}); }
  void push_long(uint64_t length) {
    const std::string_view part = take(length);
    if (length > 8) return push({});
    const bool is_negative = length > 0 && static_cast<int8_t>(part.back()) < 0;
    const uint64_t sign = is_negative && length < 8 ? ~uint64_t{0} << 8 * length : 0;
    push_integer(static_cast<int64_t>(little_endian(part) | sign));
  }
  Index pop() {
    if (stack_.empty()) fail("its stack runs empty");
    const Index top = stack_.back();
    stack_.pop_back();
    return top;
  }
  Value& top() {
    if (stack_.empty()) fail("its stack runs empty");
    return values_[stack_.back()];
  }
  /// Everything above the last mark. The mark is also removed.
  std::vector<Index> pop_to_mark() {
    std::size_t mark = stack_.size();
    while (mark > 0 && values_[stack_[mark - 1]].kind != Kind::mark) --mark;
    if (mark == 0) fail("a mark is missing");
    std::vector<Index> items(stack_.begin() + static_cast<std::ptrdiff_t>(mark), stack_.end());
    stack_.resize(mark - 1);
    return items;
  }
  void set_items(const std::vector<Index>& items) {
    Value& dict = top();
    if (items.size() % 2 != 0) fail("a key has no value");
    if (dict.kind != Kind::dict) return;  // an object of an unknown class
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const Value& key = values_[items[i]];
      if (key.kind == Kind::text) dict.entries.emplace_back(key.text, items[i + 1]);
    }
  }
  void remember(uint64_t key) {
    top();
    memo_[key] = stack_.back();
  }
  void recall(uint64_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) fail("it refers to what it has not made");
    stack_.push_back(found->second);
  }
  void call() {
    pop();
    const bool makes_dict = values_[pop()].kind == Kind::dict_type;
    push({.kind = makes_dict ? Kind::dict : Kind::opaque});
  }

  /// Opcodes whose values do not matter.
  struct Opaque {
    std::string_view ops;
    std::size_t width;  // of the length of the data that follow; 0: none follow
    int pops;           // so many values; -1: all above the last mark
    bool changes_top;   // of what is left, instead of pushing a value
  };
  static constexpr Opaque opaque_ops[]{
      {"UC", 1, 0, false},         // SHORT_BINSTRING, SHORT_BINBYTES
      {"TB", 4, 0, false},         // BINSTRING, BINBYTES
      {"\x8e\x96", 8, 0, false},   // BINBYTES8, BYTEARRAY8
      {"N\x88\x89", 0, 0, false},  // NONE, NEWTRUE, NEWFALSE
      {"])\x8f", 0, 0, false},     // EMPTY_LIST, EMPTY_TUPLE, EMPTY_SET
      {"tl\x91", 0, -1, false},    // TUPLE, LIST, FROZENSET
      {"\x85Q", 0, 1, false},      // TUPLE1, BINPERSID: a tensor's storage
      {"\x86", 0, 2, false},       // TUPLE2
      {"\x87\x92", 0, 3, false},   // TUPLE3, NEWOBJ_EX
      {"ab", 0, 1, true},          // APPEND, BUILD
      {"e\x90", 0, -1, true},      // APPENDS, ADDITEMS
  };

  void run_opaque(char op) {
    for (const auto& [ops, width, pops, changes_top] : opaque_ops) {
      if (ops.find(op) == std::string_view::npos) continue;
      if (width > 0) take(unsigned_of(width));
      for (int i = 0; i < pops; ++i) pop();
      if (pops < 0) pop_to_mark();
      if (!changes_top) return push({});
      top();
      return;
    }
    fail("it holds what torch.save does not write");
  }

  /// Opcodes that make or fill a value that matters.
  void run_value(uint8_t op) {
    switch (op) {
      case 'K':
        return push_integer(static_cast<int64_t>(unsigned_of(1)));
      case 'M':
        return push_integer(static_cast<int64_t>(unsigned_of(2)));
      case 'J':
        return push_integer(static_cast<int32_t>(static_cast<uint32_t>(unsigned_of(4))));
      case 0x8a:  // LONG1
        return push_long(unsigned_of(1));
      case 0x8b:  // LONG4
        return push_long(unsigned_of(4));
      case 'G': {
        uint64_t bits = 0;
        for (const char byte : take(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
        return push({.kind = Kind::number, .number = std::bit_cast<double>(bits)});
      }
      case 'X':
        return push_text(unsigned_of(4));
      case 0x8c:  // SHORT_BINUNICODE
        return push_text(unsigned_of(1));
      case 0x8d:  // BINUNICODE8
        return push_text(unsigned_of(8));
      case '}':
        return push({.kind = Kind::dict});
      case 'd': {
        const std::vector<Index> items = pop_to_mark();
        push({.kind = Kind::dict});
        return set_items(items);
      }
      case 's': {
        const Index value = pop();
        const Index key = pop();
        return set_items({key, value});
      }
      case 'u':
        return set_items(pop_to_mark());
      default:
        return run_opaque(static_cast<char>(op));
    }
  }

  void run(uint8_t op) {
    switch (op) {
      case 0x80:  // PROTO
        if (const uint64_t protocol = unsigned_of(1); protocol > 5) fail("its protocol is unknown");
        return;
      case 0x95:  // FRAME
        take(8);
        return;
      case '.':
        stopped_ = true;
        return;
      case '(':
        return push({.kind = Kind::mark});
      case '0':
        pop();
        return;
      case '1':
        pop_to_mark();
        return;
      case '2':
        top();
        stack_.push_back(stack_.back());
        return;
      case 'q':
        return remember(unsigned_of(1));
      case 'r':
        return remember(unsigned_of(4));
      case 0x94:  // MEMOIZE
        return remember(memo_.size());
      case 'h':
        return recall(unsigned_of(1));
      case 'j':
        return recall(unsigned_of(4));
      case 'c': {
        const std::string_view module = line();
        return push_class(module, line());
      }
      case 0x93: {  // STACK_GLOBAL
        const Index name = pop();
        const Index module = pop();
        return push_class(values_[module].text, values_[name].text);
      }
      case 'R':
      case 0x81:  // NEWOBJ
        return call();
      default:
        return run_value(op);
    }
  }

  std::string_view bytes_;
  std::size_t position_ = 0;
  bool stopped_ = false;
  std::vector<Value> values_;
  std::vector<Index> stack_;
  std::unordered_map<uint64_t, Index> memo_;
  Index root_ = 0;
};

}  // namespace TORCHAMP_NAMESPACE::detail
