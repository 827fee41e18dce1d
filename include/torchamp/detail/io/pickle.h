// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Reading a pickle]
//
// A Python checkpoint is a program for a small stack machine. Of its results, only dicts with text
// keys, numbers, booleans and None matter here. All else (tensors, lists, objects of any class)
// becomes one opaque value: nothing is imported, called or loaded. Values are in a table and refer
// to each other by index, so neither cycles nor deep nesting in a hostile file do harm; there is at
// most one value per byte.

/// Protocols 2 to 5, as torch.save writes them. Throws c10::Error for anything else.
class PickleReader {
 public:
  enum class Kind : uint8_t { opaque, none, boolean, integer, number, text, dict, mark, dict_type };
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
  const Value& operator[](Index index) const { return values_[index]; }

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
  uint64_t unsigned_of(std::size_t width) {
    const std::string_view part = take(width);
    uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) {
      value |= uint64_t{static_cast<uint8_t>(part[i])} << (8 * i);
    }
    return value;
  }
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
  void push_opaque() { push({}); }
  void push_text(uint64_t length) { push({.kind = Kind::text, .text = take(length)}); }
  void push_class(std::string_view module, std::string_view name) {
    const bool makes_dicts = module == "collections" && name == "OrderedDict";
    push({.kind = makes_dicts ? Kind::dict_type : Kind::opaque});
  }
  void push_integer(int64_t value) { push({.kind = Kind::integer, .integer = value}); }
  void push_long(uint64_t length) {
    const std::string_view part = take(length);
    if (length > 8) return push_opaque();
    uint64_t value = length > 0 && static_cast<int8_t>(part.back()) < 0 ? ~uint64_t{0} : 0;
    for (std::size_t i = part.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(part[i]);
    push_integer(static_cast<int64_t>(value));
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
  /// Everything above the last mark, which is removed, too.
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
    if (dict.kind != Kind::dict) return;  // an object that we do not know
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const Value& key = values_[items[i]];
      if (key.kind == Kind::text) dict.entries.emplace_back(key.text, items[i + 1]);
    }
  }
  void replace(int count) {
    for (int i = 0; i < count; ++i) pop();
    push_opaque();
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
      case 'N':
        return push({.kind = Kind::none});
      case 0x88:
      case 0x89:
        return push({.kind = Kind::boolean, .integer = op == 0x88});
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
      case 'U':
      case 'C':
        take(unsigned_of(1));
        return push_opaque();
      case 'T':
      case 'B':
        take(unsigned_of(4));
        return push_opaque();
      case 0x8e:  // BINBYTES8
      case 0x96:  // BYTEARRAY8
        take(unsigned_of(8));
        return push_opaque();
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
      case ']':
      case ')':
      case 0x8f:  // EMPTY_SET
        return push_opaque();
      case 't':
      case 'l':
      case 0x91:  // FROZENSET
        pop_to_mark();
        return push_opaque();
      case 0x85:
        return replace(1);
      case 0x86:
        return replace(2);
      case 0x87:
        return replace(3);
      case 'a':
        pop();
        top();
        return;
      case 'e':
      case 0x90:  // ADDITEMS
        pop_to_mark();
        top();
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
      case 0x92:  // NEWOBJ_EX
        return replace(3);
      case 'b':  // BUILD
        pop();
        top();
        return;
      case 'Q':  // BINPERSID: a tensor's storage
        return replace(1);
      default:
        fail("it holds what torch.save does not write");
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

/// Writes a dict of numbers, protocol 2.
class PickleWriter {
 public:
  PickleWriter() : bytes_("\x80\x02}(", 4) {}

  void entry(std::string_view key, double value) {
    text(key);
    bytes_ += 'G';
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) bytes_ += static_cast<char>(bits >> shift & 0xff);
  }
  void entry(std::string_view key, int64_t value) {
    text(key);
    bytes_ += "\x8a\x08";
    little_endian(static_cast<uint64_t>(value), 8);
  }
  std::string finish() && { return std::move(bytes_ += "u."); }

 private:
  void text(std::string_view key) {
    bytes_ += 'X';
    little_endian(key.size(), 4);
    bytes_ += key;
  }
  void little_endian(uint64_t value, int width) {
    for (int i = 0; i < width; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
  }

  std::string bytes_;
};

}  // namespace torchamp::detail
