// Text from users and peers: which is harmless to show, and how the rest is shown.
#include <gtest/gtest.h>

#include "base/label.hpp"
#include "base/utf8.hpp"
#include "deltasync/version.hpp"

namespace deltasync {
namespace {

using namespace std::string_literals;

TEST(Utf8, PlainTextHasNoControlCharacters) {
  for (const auto& text :
       {""s, "model.layers.0.weight"s, "\xC2\xA0\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x9A\x80"s, "a b\\\"'"s}) {
    EXPECT_TRUE(is_plain_text(text)) << text;
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Utf8, WhatIsNotPlainIsEscaped) {
  const std::pair<std::string, std::string> cases[] = {
      {"a\nb\r\t"s, "a\\x0ab\\x0d\\x09"},
      {"nul\0"s, "nul\\x00"},
      {"\x1b[31mred\x7f"s, "\\x1b[31mred\\x7f"},
      {"\xC2\x9B"
       "31m caf\xC3\xA9"s,
       "\\x9b31m caf\xC3\xA9"},
      {"caf\xE9\n"s, "caf\\xe9\\x0a"},       // Latin-1
      {"\xC3\xA9\xFF"s, "\\xc3\\xa9\\xff"},  // partly UTF-8 is none
      {"\xED\xA0\x80"s, "\\xed\\xa0\\x80"},  // a surrogate
      {"cut\xE4\xB8"s, "cut\\xe4\\xb8"},
  };
  for (const auto& [text, shown] : cases) {
    EXPECT_FALSE(is_plain_text(text)) << shown;
    EXPECT_EQ(printable(text), shown);
    EXPECT_TRUE(is_plain_text(printable(text))) << shown;
  }
}

TEST(Label, HasALimitAndIsPlain) {
  EXPECT_TRUE(check_label(""));
  EXPECT_TRUE(check_label(std::string(kLabelBytesMax, 'x')));
  EXPECT_EQ(check_label(std::string(kLabelBytesMax + 1, 'x')).error().message(),
            "the label has 128 bytes; at most 127 are possible");
  const auto refused = check_label("step\n7");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  EXPECT_EQ(refused.error().message(), "the label 'step\\x0a7' is not UTF-8, or contains a control character");
}

TEST(Label, OfDigitsIsTheVersionsOwnNumber) {
  for (const char* label : {"", "12", "0012", "step_1", "1.5", "-1", "0x1", "\u0661"}) {
    EXPECT_TRUE(check_no_other_number({{7, 12}, label})) << label;
  }
  for (const char* label : {"1", "0", "13", "18446744073709551628"}) {  // the last is 12 more than 64 bits hold
    const auto refused = check_no_other_number({{7, 12}, label});
    ASSERT_FALSE(refused) << label;
    EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  }
  EXPECT_EQ(check_no_other_number({{7, 12}, "1"}).error().message(),
            "the label '1' is another version's number, and this is version 12: give it a letter, as in step_1");
}

}  // namespace
}  // namespace deltasync
