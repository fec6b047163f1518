#include "export/name_pattern.hpp"

#include <gtest/gtest.h>

namespace deltasync::exporting {
namespace {

TEST(NamePattern, TakesNumbersFromTheirPlaces) {
  const auto found = match_name("decoder.layers.{L}.experts.{E}.weight", "decoder.layers.12.experts.3.weight");
  ASSERT_TRUE(found && *found);
  EXPECT_EQ((*found)->at("L"), 12u);
  EXPECT_EQ((*found)->at("E"), 3u);
}

TEST(NamePattern, MatchesTheWholeName) {
  for (const auto& [pattern, name] : {std::pair{"a.{L}.b", "a.x.b"},
                                      {"a.{L}.b", "a.1.bc"},
                                      {"a.{L}.b", "a..b"},
                                      {"a.{L}", "a.01"},
                                      {"a", "ab"},
                                      {"ab", "a"},
                                      {"{L}.{L}", "1.2"},
                                      {"*.b", "a.bc"}}) {
    const auto found = match_name(pattern, name);
    ASSERT_TRUE(found);
    EXPECT_FALSE(*found) << pattern << " " << name;
  }
  for (const auto& [pattern, name] : {std::pair{"*.b", "a.a.b"},
                                      {"*_state", "x._extra_state"},
                                      {"a*", "a"},
                                      {"{L}.{L}", "7.7"},
                                      {"*.{L}.*", "a.b.3.c"}}) {
    const auto found = match_name(pattern, name);
    ASSERT_TRUE(found);
    EXPECT_TRUE(*found) << pattern << " " << name;
  }
}

TEST(NamePattern, BadOnesAreRefused) {
  EXPECT_FALSE(match_name("a.{L", "a.1"));
  EXPECT_FALSE(match_name("a.L}", "a.1"));
  EXPECT_FALSE(match_name("a.{}", "a.1"));
  EXPECT_FALSE(match_name("*a*b*", "ab"));
}

TEST(NamePattern, ExpandsExpressions) {
  const Names names = [](const std::string& name) -> Result<std::optional<double>> {
    return std::optional<double>(name == "layers" ? 61 : 1);
  };
  EXPECT_EQ(expand_name("model.layers.{layers + M}.enorm", names).value(), "model.layers.62.enorm");
  EXPECT_EQ(expand_name("plain", names).value(), "plain");
  EXPECT_FALSE(expand_name("a.{layers", names));
  EXPECT_FALSE(expand_name("a.{1 / 2}", names));
}

}  // namespace
}  // namespace deltasync::exporting
