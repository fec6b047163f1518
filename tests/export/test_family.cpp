#include "export/family.hpp"

#include <gtest/gtest.h>

#include <set>

namespace deltasync::exporting {
namespace {

TEST(Family, ThePagesThatComeAlongAreWhole) {
  std::set<std::string> architectures;
  for (const auto& [name, text] : builtin_families()) {
    const auto family = parse_family(text, name);
    ASSERT_TRUE(family) << family.error().to_string();
    for (const std::string& architecture : family->architectures) {
      EXPECT_TRUE(architectures.insert(architecture).second) << architecture << " has two pages";
      const auto found = find_family({}, std::span(&architecture, 1));
      ASSERT_TRUE(found) << found.error().to_string();
      EXPECT_EQ(found->name, family->name);
      EXPECT_FALSE(found->rows.empty());
    }
  }
  EXPECT_TRUE(architectures.contains("LlamaForCausalLM"));
}

TEST(Family, OwnRowsComeFirst) {
  const auto mine = parse_family(R"(
name = "mine"
architectures = ["MineForCausalLM"]
inherits = "llama"
[sizes]
hd = "64"
[[rows]]
mcore = ["decoder.final_layernorm.weight"]
hf = "my.norm"
add = 1
optional = true
when = "true"
)",
                                 "mine.toml");
  ASSERT_TRUE(mine) << mine.error().to_string();
  const std::string architecture = "MineForCausalLM";
  const auto found = find_family(std::span(&*mine, 1), std::span(&architecture, 1));
  ASSERT_TRUE(found) << found.error().to_string();
  EXPECT_EQ(found->sizes.at("hd"), "64");
  EXPECT_TRUE(found->sizes.contains("groups")) << "of llama";
  EXPECT_EQ(found->rows.front().targets.front().hf, "my.norm");
  EXPECT_EQ(found->rows.front().add, 1);
  EXPECT_EQ(found->rows.front().label, "mine:7");
  EXPECT_GT(found->rows.size(), 10u);
}

TEST(Family, TheFirstArchitectureCounts) {
  const std::vector<std::string> both = {"Qwen3MoeForCausalLM", "LlamaForCausalLM"};
  EXPECT_EQ(find_family({}, both)->name, "qwen3-moe");
  const std::vector<std::string> other = {"NobodyForCausalLM", "LlamaForCausalLM"};
  EXPECT_EQ(find_family({}, other)->name, "llama");
}

TEST(Family, OfAnUnknownModel) {
  const std::string architecture = "NobodyForCausalLM";
  const auto found = find_family({}, std::span(&architecture, 1));
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Errc::not_found);
  EXPECT_NE(found.error().message().find("LlamaForCausalLM"), std::string::npos);
}

TEST(Family, RoundsAndGapsOfInheritance) {
  for (const char* parent : {"mine", "nobody"}) {
    const auto mine =
        parse_family(std::string("name = \"mine\"\narchitectures = \"A\"\ninherits = \"") + parent + "\"", "f");
    ASSERT_TRUE(mine);
    const std::string architecture = "A";
    EXPECT_FALSE(find_family(std::span(&*mine, 1), std::span(&architecture, 1))) << parent;
  }
}

TEST(Family, PagesThatFitNothingAreNamed) {
  std::vector<Family> given;
  for (const char* page :
       {"name = \"mine\"\narchitectures = \"A\"\ninherits = \"base\"", "name = \"base\"\ninherits = \"llama\"",
        "name = \"second\"\narchitectures = [\"A\", \"C\"]"}) {
    given.push_back(*parse_family(page, "f"));
  }
  const std::vector<std::string> of_model = {"A", "D"};
  ASSERT_TRUE(find_family(given, of_model));
  given.push_back(*parse_family("name = \"other\"\narchitectures = [\"B\", \"C\"]", "f"));
  given.push_back(*parse_family("name = \"nobody's\"", "f"));
  const auto found = find_family(given, of_model);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Errc::invalid_argument);
  EXPECT_EQ(found.error().message(),
            "no use for the family page other (for B, C), nobody's (for none): the model is A, D; name that in the "
            "page's architectures, or give no such page");
}

TEST(Family, WrongPagesNameTheLine) {
  struct Wrong {
    const char* text;
    const char* says;
  };
  for (const auto& [text, says] : {
           Wrong{"name = ", "f:1"},
           {"architectures = [\"A\"]", "'name'"},
           {"name = \"a\"\nnames = 1", "f:2: no key 'names'"},
           {"name = \"a\"\n[[rows]]\nhf = \"x\"", "f:2: 'mcore'"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"", "'hf'"},
           {"name = \"a\"\n[[rows]]\nmcore = 3\nhf = \"x\"", "f:3"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nparts = \"[a: 1]\"\nhf = \"x\"", "hf.PART"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf.a = \"x\"", "'hf'"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\nadd = \"1\"", "f:5"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\noptional = 1", "f:5"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\nalternative = \"\"", "f:5"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\nalternative = true",
            "f:5: 'alternative' is to be the name of a form, the same in all rows of it: alternative = \"transposed\""},
           {"name = \"a\"\n[[renames]]\nmcore = \"x\"\nto = \"y\"\nhf = \"z\"", "'hf_to'"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\nadd = nan", "f:5"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\nadd = 1e39", "f:5"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nhf = \"x\"\nview.q = \"a b -> b a\"", "view.q"},
           {"name = \"a\"\n[[rows]]\nmcore = \"x\"\nparts = \"[q: 1]\"\nhf.q = \"x\"\nview.k = \"a b -> b a\"",
            "view.k"},
           {"name = \"a\"\n[rows]\nmcore = \"x\"\nhf = \"x\"", "[[rows]]"},
           {"name = \"a\"\n[[constants]]\nof = \"x\"", "'hf'"},
           {"name = \"a\"\n[[aliases]]\nhf = \"x\"", "'of'"},
           {"name = \"a\"\n[sizes]\nn = 3", "f:3"},
       }) {
    const auto family = parse_family(text, "f");
    ASSERT_FALSE(family) << text;
    EXPECT_NE(family.error().message().find(says), std::string::npos) << family.error().message();
  }
}

}  // namespace
}  // namespace deltasync::exporting
