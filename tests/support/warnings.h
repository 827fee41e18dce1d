// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>

/// Throws each of LibTorch's warnings of the calling thread as a std::runtime_error.
class ThrownWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { throw std::runtime_error(warning.msg()); }

 private:
  c10::WarningUtils::WarnAlways always_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

/// Collects LibTorch's warnings of the calling thread, those that are given only once included.
class CollectedWarnings final : c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text_ += warning.msg() + '\n'; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  c10::WarningUtils::WarnAlways always_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};
