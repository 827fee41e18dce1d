// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

/// Expects `statement` to throw a c10::Error whose text (without the backtrace) holds `text`.
#define EXPECT_ERROR(statement, text)                                                           \
  do {                                                                                          \
    try {                                                                                       \
      statement;                                                                                \
      ADD_FAILURE() << "no error from: " #statement << "\nexpected: " << (text);                \
    } catch (const ::c10::Error& thrown_) {                                                     \
      EXPECT_THAT(::std::string(thrown_.what_without_backtrace()), ::testing::HasSubstr(text)); \
    }                                                                                           \
  } while (false)
