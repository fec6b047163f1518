#include "export/expression.hpp"

#include <gtest/gtest.h>

#include <map>

namespace deltasync::exporting {
namespace {

Result<std::optional<double>> names(const std::string& name) {
  static const std::map<std::string, double> values = {{"heads", 8}, {"groups", 2}, {"moe.experts", 4}, {"or_more", 3}};
  const auto found = values.find(name);
  return found == values.end() ? std::optional<double>() : std::optional<double>(found->second);
}

double value(std::string_view expression) {
  const auto made = evaluate(expression, names);
  EXPECT_TRUE(made) << expression << ": " << (made ? "" : made.error().to_string());
  EXPECT_TRUE(made && *made) << expression;
  return made && *made ? **made : -1;
}

TEST(Expression, BindsAsInArithmetic) {
  EXPECT_EQ(value("heads / groups"), 4);
  EXPECT_EQ(value("2 + 3 * heads - 1"), 25);
  EXPECT_EQ(value("(2 + 3) * heads"), 40);
  EXPECT_EQ(value("16 / 4 / 2"), 2);
  EXPECT_EQ(value("10 - 4 - 3"), 3);
  EXPECT_EQ(value(" moe.experts*0.5 "), 2);
}

TEST(Expression, TruthIsANumber) {
  EXPECT_EQ(value("heads == 8 and groups < 3"), 1);
  EXPECT_EQ(value("heads != 8 or not groups >= 3"), 1);
  EXPECT_EQ(value("not true"), 0);
  EXPECT_EQ(value("heads <= 7 or false"), 0);
  EXPECT_EQ(value("or_more"), 3) << "a name that begins with a word of the language";
}

TEST(Expression, TheFirstAlternativeThatIsThere) {
  EXPECT_EQ(value("head_dim | heads * 2"), 16);
  EXPECT_EQ(value("groups | heads"), 2);
  EXPECT_EQ(value("(tied | false) == 0"), 1);
  std::string missing;
  const auto made = evaluate("heads * head_dim", names, &missing);
  ASSERT_TRUE(made);
  EXPECT_FALSE(*made);
  EXPECT_EQ(missing, "head_dim");
}

TEST(Expression, WhatIsNoneIsRefused) {
  for (const std::string_view text :
       {"", "heads heads", "heads +", "(heads", "heads)", "1 / 0", "heads / (groups - 2)", "#", "not", "| heads"}) {
    EXPECT_FALSE(evaluate(text, names)) << text;
  }
  EXPECT_FALSE(evaluate(std::string(200, '(') + "1" + std::string(200, ')'), names));
  std::string nots;
  for (int i = 0; i < 200; ++i) nots += "not ";
  EXPECT_FALSE(evaluate(nots + "1", names));
}

TEST(Expression, SizesAreWhole) {
  EXPECT_EQ(evaluate_size("heads / groups", names).value(), 4u);
  EXPECT_FALSE(evaluate_size("groups / heads", names));
  EXPECT_FALSE(evaluate_size("groups - heads", names));
  EXPECT_FALSE(evaluate_size("1e30", names));
  const auto missing = evaluate_size("hidden", names);
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message().find("'hidden'"), std::string::npos);
}

}  // namespace
}  // namespace deltasync::exporting
