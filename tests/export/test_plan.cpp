#include "export/plan.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace deltasync::exporting {
namespace {

constexpr const char* kConfig = R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 6, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 3, "vocab_size": 10, "tie_word_embeddings": false})";
constexpr std::uint64_t kHidden = 6;
constexpr std::uint64_t kFfn = 5;

using Shape = std::vector<std::uint64_t>;
using Rows = std::function<std::pair<std::string, std::uint64_t>(std::uint64_t row)>;

struct ModelTensor {
  std::string key;
  Shape shape;
};

std::vector<ModelTensor> trainer_tensors() {
  return {{"embedding.word_embeddings.weight", {12, kHidden}},  // two rows of padding
          {"output_layer.weight", {12, kHidden}},
          {"decoder.final_layernorm.weight", {kHidden}},
          {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", {kHidden}},
          {"decoder.layers.0.self_attention.linear_qkv.weight", {24, kHidden}},
          {"decoder.layers.0.self_attention.linear_qkv.bias", {24}},
          {"decoder.layers.0.self_attention.linear_proj.weight", {kHidden, 12}},
          {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", {kHidden}},
          {"decoder.layers.0.mlp.linear_fc1.weight", {2 * kFfn, kHidden}},
          {"decoder.layers.0.mlp.linear_fc2.weight", {kHidden, kFfn}},
          {"decoder.layers.0.self_attention._extra_state", {1}}};
}

std::vector<TensorSpec> hf_specs(Dtype dtype) {
  const std::vector<std::pair<std::string, Shape>> tensors = {
      {"model.embed_tokens.weight", {10, kHidden}},
      {"model.layers.0.input_layernorm.weight", {kHidden}},
      {"model.layers.0.self_attn.q_proj.weight", {12, kHidden}},
      {"model.layers.0.self_attn.q_proj.bias", {12}},
      {"model.layers.0.self_attn.k_proj.weight", {6, kHidden}},
      {"model.layers.0.self_attn.k_proj.bias", {6}},
      {"model.layers.0.self_attn.v_proj.weight", {6, kHidden}},
      {"model.layers.0.self_attn.v_proj.bias", {6}},
      {"model.layers.0.self_attn.o_proj.weight", {kHidden, 12}},
      {"model.layers.0.post_attention_layernorm.weight", {kHidden}},
      {"model.layers.0.mlp.gate_proj.weight", {kFfn, kHidden}},
      {"model.layers.0.mlp.up_proj.weight", {kFfn, kHidden}},
      {"model.layers.0.mlp.down_proj.weight", {kHidden, kFfn}},
      {"model.norm.weight", {kHidden}},
      {"lm_head.weight", {10, kHidden}}};
  std::vector<TensorSpec> specs;
  for (const auto& [name, shape] : tensors) specs.push_back({.name = name, .dtype = dtype, .shape = shape});
  return specs;
}

/// Where a row of a HF tensor comes from, from the rules of megatron-core and not from a page: key and row.
std::pair<std::string, std::uint64_t> origin(const std::string& name, std::uint64_t row) {
  const std::string layer = "decoder.layers.0.";
  const auto group_major = [&](std::uint64_t first, std::uint64_t rows, const char* what) {
    return std::pair<std::string, std::uint64_t>(layer + "self_attention.linear_qkv." + what,
                                                 row / rows * 12 + first + row % rows);
  };
  const std::string attn = "model.layers.0.self_attn.";
  for (const char* what : {"weight", "bias"}) {
    if (name == attn + "q_proj." + what) return group_major(0, 6, what);
    if (name == attn + "k_proj." + what) return group_major(6, 3, what);
    if (name == attn + "v_proj." + what) return group_major(9, 3, what);
  }
  if (name == "model.layers.0.mlp.gate_proj.weight") return {layer + "mlp.linear_fc1.weight", row};
  if (name == "model.layers.0.mlp.up_proj.weight") return {layer + "mlp.linear_fc1.weight", kFfn + row};
  const std::map<std::string, std::string> same = {
      {"model.embed_tokens.weight", "embedding.word_embeddings.weight"},
      {"lm_head.weight", "output_layer.weight"},
      {"model.norm.weight", "decoder.final_layernorm.weight"},
      {"model.layers.0.input_layernorm.weight", layer + "self_attention.linear_qkv.layer_norm_weight"},
      {"model.layers.0.post_attention_layernorm.weight", layer + "mlp.linear_fc1.layer_norm_weight"},
      {attn + "o_proj.weight", layer + "self_attention.linear_proj.weight"},
      {"model.layers.0.mlp.down_proj.weight", layer + "mlp.linear_fc2.weight"}};
  return {same.at(name), row};
}

class ExportPlanTest : public testing::Test {
 protected:
  ExportPlanTest() {
    float next = 1;
    for (const ModelTensor& tensor : trainer_tensors()) {
      std::uint64_t count = 1;
      for (const std::uint64_t size : tensor.shape) count *= size;
      for (std::uint64_t i = 0; i < count; ++i) values_[tensor.key].push_back(next++);
    }
  }

  /// Cuts each tensor at random places along each dimension, and deals the boxes to the ranks.
  void cut(std::uint64_t seed, std::uint32_t ranks, const std::vector<ModelTensor>& tensors = trainer_tensors()) {
    std::mt19937_64 random(seed);
    shards_.assign(ranks, {});
    memory_.assign(ranks, {});
    for (const ModelTensor& tensor : tensors) {
      std::vector<ShardPiece> pieces{{tensor.key, Dtype::f32, tensor.shape, {}, {}}};
      for (const std::uint64_t size : tensor.shape) {
        const std::uint64_t edge = 1 + random() % size;
        std::vector<ShardPiece> next;
        for (const ShardPiece& piece : pieces) {
          for (const auto& [begin, end] : {std::pair{std::uint64_t{0}, edge}, {edge, size}}) {
            if (begin == end) continue;
            next.push_back(piece);
            next.back().offset.push_back(begin);
            next.back().shape.push_back(end - begin);
          }
        }
        pieces = std::move(next);
      }
      for (ShardPiece& piece : pieces) give(random() % ranks, std::move(piece));
    }
  }

  void give(std::size_t rank, ShardPiece piece) {
    std::vector<float> local;
    const std::vector<float>& all = values_.at(piece.key);
    const std::uint64_t cols = piece.global_shape.size() == 2 ? piece.global_shape[1] : 1;
    for (std::uint64_t row = 0; row < piece.shape[0]; ++row) {
      for (std::uint64_t col = 0; col < (piece.shape.size() == 2 ? piece.shape[1] : 1); ++col) {
        const std::uint64_t first_col = piece.offset.size() == 2 ? piece.offset[1] : 0;
        local.push_back(all[(piece.offset[0] + row) * cols + first_col + col]);
      }
    }
    memory_[rank].push_back(std::move(local));
    shards_[rank].push_back(std::move(piece));
  }

  Result<ExportPlan> plan(const char* config = kConfig, std::vector<std::string> ignored = {}) {
    DS_ASSIGN(const auto names, architectures_of(config));
    DS_ASSIGN(const Family family, find_family(pages_, names));
    return plan_export(family, config, Layout::build(specs_).value(), shards_, ignored);
  }

  /// Carries the plan out and compares each element with where it comes from.
  void expect_right(const ExportPlan& made) {
    for (std::uint32_t i = 0; i < made.layout->tensors().size(); ++i) {
      const Tensor& tensor = made.layout->tensors()[i];
      std::vector<std::byte> bytes(tensor.bytes);
      for (const ExportCopy& copy : made.copies) {
        if (copy.tensor != i) continue;
        const auto source = std::as_bytes(std::span(memory_[copy.rank][copy.piece]));
        const Status status = apply_on_host(made, copy, Dtype::f32, source, bytes);
        ASSERT_TRUE(status) << status.error().to_string();
      }
      const std::uint64_t cols = tensor.spec.shape.size() == 2 ? tensor.cols : 1;
      for (std::uint64_t row = 0; row < tensor.spec.shape[0]; ++row) {
        const auto [key, from] = origin(tensor.spec.name, row);
        for (std::uint64_t col = 0; col < cols; ++col) {
          float found = 0;
          if (tensor.spec.dtype == Dtype::f32) {
            std::memcpy(&found, &bytes[(row * cols + col) * 4], 4);
          } else {
            std::uint32_t bits = 0;
            std::memcpy(reinterpret_cast<std::byte*>(&bits) + 2, &bytes[(row * cols + col) * 2], 2);
            std::memcpy(&found, &bits, 4);
          }
          ASSERT_EQ(found, values_[key][from * cols + col]) << tensor.spec.name << " " << row << "," << col;
        }
      }
    }
  }

  void expect_error(Errc code, const std::vector<std::string>& says, const char* config = kConfig) {
    const auto made = plan(config);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code(), code) << made.error().to_string();
    for (const std::string& text : says) {
      EXPECT_NE(made.error().to_string().find(text), std::string::npos) << made.error().to_string();
    }
  }

  std::map<std::string, std::vector<float>> values_;
  std::vector<std::vector<ShardPiece>> shards_;
  std::vector<std::vector<std::vector<float>>> memory_;
  std::vector<TensorSpec> specs_ = hf_specs(Dtype::f32);
  std::vector<Family> pages_;
};

TEST_F(ExportPlanTest, HoweverTheRanksShareTheTensors) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    cut(seed, 1 + static_cast<std::uint32_t>(seed % 5));
    const auto made = plan();
    ASSERT_TRUE(made) << made.error().to_string();
    EXPECT_EQ(made->ignored, std::vector<std::string>{"decoder.layers.0.self_attention._extra_state"});
    expect_right(*made);
    if (HasFailure()) return;
  }
}

TEST_F(ExportPlanTest, IntoAnotherDtype) {
  specs_ = hf_specs(Dtype::bf16);
  for (auto& [key, values] : values_) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 200);  // exact in bf16
  }
  cut(3, 3);
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  expect_right(*made);
}

TEST_F(ExportPlanTest, RoundsToTheNearestEven) {
  const auto layout = Layout::build({{.name = "t", .dtype = Dtype::bf16, .shape = {5}}}).value();
  const ExportPlan made{layout, "", {""}, {}, {}, {}, {}};
  const ExportCopy copy{0, 0, 0, 0, 0, 0, {{5, 1, 1}}, 0};
  const std::vector<float> values{1.00390625F, 1.01171875F, -1.0040F, std::nanf(""), -0.0F};
  std::vector<std::uint16_t> out(5);
  ASSERT_TRUE(
      apply_on_host(made, copy, Dtype::f32, std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(out))));
  EXPECT_EQ(out, (std::vector<std::uint16_t>{0x3F80, 0x3F82, 0xBF81, 0x7FC0, 0x8000}));
}

TEST_F(ExportPlanTest, AddsWhatTheRowSays) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[rows]]
mcore = "decoder.final_layernorm.weight"
hf = "model.norm.weight"
add = 1
)",
                           "mine");
  ASSERT_TRUE(mine);
  pages_.push_back(*std::move(mine));
  cut(1, 2);
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  for (float& value : values_["decoder.final_layernorm.weight"]) value += 1;
  expect_right(*made);
}

TEST_F(ExportPlanTest, AnAliasOfAnAliasInAnyOrder) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[aliases]]
hf = "a"
of = "nowhere"
[[aliases]]
hf = "a"
of = "b"
[[aliases]]
hf = "b"
of = "model.norm.weight"
)",
                           "mine");
  ASSERT_TRUE(mine);
  pages_.push_back(*std::move(mine));
  for (const char* name : {"a", "b"}) {
    specs_.insert(specs_.begin() + (name[0] == 'b' ? 1 : 0), {.name = name, .dtype = Dtype::f32, .shape = {kHidden}});
  }
  cut(5, 2);
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
}

TEST_F(ExportPlanTest, SizesOfSizesAreMadeOnce) {
  std::string page = "name = \"mine\"\narchitectures = [\"LlamaForCausalLM\"]\ninherits = \"llama\"\n[sizes]\n";
  for (int i = 0; i < 31; ++i) {
    page += "s" + std::to_string(i) + " = \"s" + std::to_string(i + 1) + " + s" + std::to_string(i + 1) + "\"\n";
  }
  page +=
      "s31 = \"1\"\n[[rows]]\nmcore = \"decoder.final_layernorm.weight\"\nhf = \"model.norm.weight\"\nwhen = \"s0\"";
  auto mine = parse_family(page, "mine");
  ASSERT_TRUE(mine) << mine.error().to_string();
  pages_.push_back(*std::move(mine));
  cut(5, 2);
  EXPECT_TRUE(plan());
}

TEST_F(ExportPlanTest, PlacesOfAStackThatNobodyFills) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[rows]]
mcore = "expert.{E}.weight"
view = "a -> E/3 a"
hf = "experts"
)",
                           "mine");
  ASSERT_TRUE(mine);
  pages_.push_back(*std::move(mine));
  specs_.push_back({.name = "experts", .dtype = Dtype::f32, .shape = {3, 2}});
  std::vector<ModelTensor> tensors = trainer_tensors();
  for (const char* key : {"expert.0.weight", "expert.2.weight"}) {
    tensors.push_back({key, {2}});
    values_[key] = {1, 2};
  }
  cut(5, 2, tensors);
  expect_error(Errc::coverage, {"experts (2 of 3 places)"});
}

TEST_F(ExportPlanTest, TensorsOfTheTrainerThatAreRangesOfOne) {
  const auto with = [&](const char* second) {
    auto mine = parse_family(std::string(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[rows]]
mcore = "first.weight"
view = "a -> a@0/5"
hf = "both"
[[rows]]
mcore = "second.weight"
hf = "both"
view = ")") + second + "\"\n",
                             "mine");
    ASSERT_TRUE(mine) << mine.error().to_string();
    pages_ = {*std::move(mine)};
  };
  specs_.push_back({.name = "both", .dtype = Dtype::f32, .shape = {5}});
  std::vector<ModelTensor> tensors = trainer_tensors();
  tensors.push_back({"first.weight", {2}});
  tensors.push_back({"second.weight", {3}});
  values_["first.weight"] = {1, 2};
  values_["second.weight"] = {3, 4, 5};
  cut(5, 2, tensors);
  with("a -> a@2/5");
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  std::vector<float> both(5);
  for (const ExportCopy& copy : made->copies) {
    if (made->layout->tensors()[copy.tensor].spec.name != "both") continue;
    const auto source = std::as_bytes(std::span(memory_[copy.rank][copy.piece]));
    ASSERT_TRUE(apply_on_host(*made, copy, Dtype::f32, source, std::as_writable_bytes(std::span(both))));
  }
  EXPECT_EQ(both, (std::vector<float>{1, 2, 3, 4, 5}));
  with("a -> a@1/5");
  expect_error(Errc::coverage, {"both is written twice"});
  with("a -> a");
  expect_error(Errc::layout_mismatch, {"both has [5]"});
  tensors.pop_back();
  cut(5, 2, tensors);
  expect_error(Errc::coverage, {"both (2 of 5 places)"});
}

TEST_F(ExportPlanTest, RenamesOnDisk) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[renames]]
mcore = "vision_and_text.predictor.{M}."
to = "decoder.layers.{M}."
hf = "model.layers.{M}."
hf_to = "mtp.{M + 4}."
[[renames]]
mcore = ["vision_and_text.", ""]
to = ""
hf = "model."
hf_to = "model.language_model."
)",
                           "mine");
  ASSERT_TRUE(mine) << mine.error().to_string();
  pages_.push_back(*std::move(mine));
  for (TensorSpec& spec : specs_) {
    if (spec.name.starts_with("model.")) spec.name.insert(6, "language_model.");
  }
  specs_.push_back({.name = "mtp.6.input_layernorm.weight", .dtype = Dtype::f32, .shape = {2}});
  std::vector<ModelTensor> tensors = trainer_tensors();
  const std::string norm = "vision_and_text.predictor.2.input_layernorm.weight";
  tensors.push_back({norm, {2}});
  values_[norm] = {5, 6};
  tensors[2].key.insert(0, "vision_and_text.");
  values_[tensors[2].key] = values_["decoder.final_layernorm.weight"];
  cut(5, 2, tensors);
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
}

TEST_F(ExportPlanTest, AnAlternativeCountsWhereTheDirectoryHasItsTensor) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[rows]]
mcore = "expert.{E}.weight"
view = "a -> E/2 a"
hf = "experts"
alternative = "stacked"
[[rows]]
mcore = "expert.{E}.weight"
hf = "experts.{E}"
)",
                           "mine");
  ASSERT_TRUE(mine) << mine.error().to_string();
  pages_.push_back(*std::move(mine));
  std::vector<ModelTensor> tensors = trainer_tensors();
  for (const char* key : {"expert.0.weight", "expert.1.weight"}) {
    tensors.push_back({key, {2}});
    values_[key] = {1, 2};
  }
  cut(5, 2, tensors);
  expect_error(Errc::coverage, {"experts.0 (of expert.0.weight)"});
  const std::vector<TensorSpec> without = specs_;
  specs_.push_back({.name = "experts", .dtype = Dtype::f32, .shape = {2, 2}});
  EXPECT_TRUE(plan());
  specs_.back().shape = {2, 1, 2};
  expect_error(Errc::coverage, {"experts.0 (of expert.0.weight)"});
  specs_ = without;
  specs_.push_back({.name = "experts.0", .dtype = Dtype::f32, .shape = {2}});
  specs_.push_back({.name = "experts.1", .dtype = Dtype::f32, .shape = {2}});
  EXPECT_TRUE(plan());
}

TEST_F(ExportPlanTest, AFormCountsWhereAnotherTensorTellsIt) {
  std::string page = "name = \"mine\"\narchitectures = [\"LlamaForCausalLM\"]\ninherits = \"llama\"\n";
  for (const std::string form : {"view = \"a b -> b a\"\nalternative = \"turned\"\n", "alternative = \"plain\"\n"}) {
    for (const std::string name : {"up", "down"}) {
      page.append("[[rows]]\nmcore = \"").append(name).append("\"\nhf = \"its_").append(name).append("\"\n" + form);
    }
  }
  pages_.push_back(parse_family(page, "mine").value());
  const std::vector<TensorSpec> others = specs_;
  const auto rows = [&](const std::vector<std::pair<Shape, Shape>>& shapes) {
    std::vector<ModelTensor> tensors = trainer_tensors();
    specs_ = others;
    for (const char* key : {"up", "down"}) {
      const auto& [mine, there] = shapes[specs_.size() - others.size()];
      tensors.push_back({key, mine});
      values_[key].assign(mine[0] * mine[1], 1);
      specs_.push_back({.name = std::string("its_") + key, .dtype = Dtype::f32, .shape = there});
    }
    cut(5, 1, tensors);
    const auto made = plan();
    if (!made) return made.error().message();
    std::set<std::string> used;
    for (const ExportCopy& copy : made->copies) {
      if (copy.tensor >= others.size()) used.insert(made->rows[copy.row]);
    }
    return std::accumulate(used.begin(), used.end(), std::string());
  };
  EXPECT_EQ(rows({{{3, 3}, {3, 3}}, {{3, 6}, {6, 3}}}), "mine:4mine:9");
  EXPECT_EQ(rows({{{3, 3}, {3, 3}}, {{3, 6}, {3, 6}}}), "mine:14mine:18");
  EXPECT_EQ(rows({{{6, 3}, {3, 6}}, {{3, 3}, {3, 3}}}), "mine:4mine:9");
  EXPECT_EQ(
      rows({{{3, 3}, {3, 3}}, {{3, 3}, {3, 3}}}),
      "down is ambiguous; 2 rows make the directory's shape: mine:9 (turned), mine:18 (plain); and no other tensor "
      "tells which alternative the directory is");
}

TEST_F(ExportPlanTest, ReplicasCountOnce) {
  cut(5, 2);
  give(1, shards_[0][0]);
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  expect_right(*made);
}

TEST_F(ExportPlanTest, ARankHasNoReplicas) {
  cut(5, 2);
  give(0, shards_[0][0]);  // as of two models
  expect_error(Errc::coverage, {shards_[0][0].key, "rank 0", "overlap"});
}

TEST_F(ExportPlanTest, TiedEmbeddings) {
  std::vector<ModelTensor> tensors = trainer_tensors();
  tensors.erase(tensors.begin() + 1);
  cut(5, 2, tensors);
  values_["output_layer.weight"] = values_["embedding.word_embeddings.weight"];
  const std::string tied = std::string(kConfig).replace(std::string(kConfig).find("false"), 5, "true");
  const auto made = plan(tied.c_str());
  ASSERT_TRUE(made) << made.error().to_string();
  expect_right(*made);
  expect_error(Errc::coverage, {"lm_head.weight"});
  specs_.pop_back();  // a directory without it
  EXPECT_TRUE(plan(tied.c_str()));
}

TEST_F(ExportPlanTest, AliasesAndConstantsOfEachLayer) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[aliases]]
hf = "model.layers.{L}.shared_norm.weight"
of = "model.layers.{L - 1}.input_layernorm.weight"
[[renames]]
mcore = ["predictor.{M}."]
to = "decoder.layers.{M + 7}."
[[rows]]
mcore = "decoder.layers.{L}.enorm.weight"
hf = "model.layers.{L}.enorm.weight"
)",
                           "mine");
  ASSERT_TRUE(mine) << mine.error().to_string();
  pages_.push_back(*std::move(mine));
  specs_.push_back({.name = "model.layers.1.shared_norm.weight", .dtype = Dtype::f32, .shape = {kHidden}});
  specs_.push_back({.name = "model.layers.0.self_attn.rotary_emb.inv_freq", .dtype = Dtype::f32, .shape = {3}});
  specs_.push_back({.name = "model.layers.9.enorm.weight", .dtype = Dtype::f32, .shape = {2}});
  std::vector<ModelTensor> tensors = trainer_tensors();
  tensors.push_back({"predictor.2.enorm.weight", {2}});
  values_["predictor.2.enorm.weight"] = {5, 6};
  cut(5, 2, tensors);
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  const auto index = [&](const char* name) { return *made->layout->find(name); };
  EXPECT_EQ(made->constants, std::vector{index("model.layers.0.self_attn.rotary_emb.inv_freq")});
  const auto copies_to = [&](std::uint32_t tensor) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> from;
    for (const ExportCopy& copy : made->copies) {
      if (copy.tensor == tensor) from.emplace_back(copy.rank, copy.piece);
    }
    return from;
  };
  EXPECT_EQ(copies_to(index("model.layers.1.shared_norm.weight")),
            copies_to(index("model.layers.0.input_layernorm.weight")));
  EXPECT_FALSE(copies_to(index("model.layers.9.enorm.weight")).empty());
}

TEST_F(ExportPlanTest, WhatIsLeftOverOnEitherSideIsNamed) {
  specs_.push_back({.name = "model.extra.weight", .dtype = Dtype::f32, .shape = {3}});
  specs_.erase(specs_.begin());
  std::vector<ModelTensor> tensors = trainer_tensors();
  tensors.push_back({"decoder.layers.0.adapter.weight", {3}});
  values_["decoder.layers.0.adapter.weight"] = {1, 2, 3};
  cut(5, 2, tensors);
  expect_error(Errc::coverage, {"1 tensors of the model directory that nothing is written to: model.extra.weight",
                                "1 tensors of the trainer that no row is for: decoder.layers.0.adapter.weight",
                                "model.embed_tokens.weight (of embedding.word_embeddings.weight)",
                                "[[constants]] are what keeps the directory's bytes, or name what is no part of the "
                                "model as ignored"});
}

TEST_F(ExportPlanTest, WhatTheUserIgnoresGoesNowhere) {
  std::vector<ModelTensor> tensors = trainer_tensors();
  tensors.push_back({"decoder.layers.0.adapter.weight", {3}});
  values_["decoder.layers.0.adapter.weight"] = {1, 2, 3};
  cut(5, 2, tensors);
  EXPECT_TRUE(plan(kConfig, {"*.adapter.*"}));
}

TEST_F(ExportPlanTest, WhatAnOptionalRowDropsIsNamed) {
  auto mine = parse_family(R"(
name = "mine"
architectures = ["LlamaForCausalLM"]
inherits = "llama"
[[rows]]
mcore = "head.weight"
hf = "score.weight"
optional = true
[[rows]]
mcore = "both.weight"
parts = "[a: 1, _: 1, b: 2]"
hf.a = "a"
hf.b = "b"
optional = true
)",
                           "mine");
  ASSERT_TRUE(mine) << mine.error().to_string();
  pages_.push_back(*std::move(mine));
  std::vector<ModelTensor> tensors = trainer_tensors();
  for (const char* key : {"head.weight", "both.weight"}) {
    tensors.push_back({key, {4}});
    values_[key] = {1, 2, 3, 4};
  }
  cut(5, 2, tensors);
  const std::string extra = "decoder.layers.0.self_attention._extra_state";
  auto made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_EQ(made->ignored, (std::vector<std::string>{"both.weight", extra, "head.weight"}));
  specs_.push_back({.name = "a", .dtype = Dtype::f32, .shape = {1}});
  made = plan();
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_EQ(made->ignored, (std::vector<std::string>{"both.weight[b]", extra, "head.weight"}));
}

TEST_F(ExportPlanTest, GapsAndOverlapsOfTheRanks) {
  cut(5, 2);
  const ShardPiece lost = shards_[1].back();
  shards_[1].pop_back();
  expect_error(Errc::coverage, {lost.key, "no rank has"});
  shards_[1].push_back(lost);
  ShardPiece wider = shards_[0].front();
  wider.offset.assign(wider.offset.size(), 0);
  wider.shape = wider.global_shape;
  if (wider.shape == shards_[0].front().shape) GTEST_FAIL() << "the seed makes no cut";
  shards_[1].push_back(wider);
  expect_error(Errc::coverage, {wider.key, "overlap", "rank 1"});
}

TEST_F(ExportPlanTest, ShapesThatThePageDoesNotMake) {
  specs_[2].shape = {13, kHidden};
  cut(5, 2);
  expect_error(Errc::layout_mismatch, {"llama:", "[12, 6]", "q_proj.weight has [13, 6]"});
  specs_ = hf_specs(Dtype::f32);
  const std::string other =
      std::string(kConfig).replace(std::string(kConfig).find("\"head_dim\": 3"), 13, "\"head_dim\": 4");
  expect_error(Errc::invalid_argument, {"linear_qkv", "24"}, other.c_str());
}

TEST_F(ExportPlanTest, DtypesWithoutACast) {
  specs_ = hf_specs(Dtype::f16);
  cut(5, 2);
  expect_error(Errc::unsupported, {"F32", "F16"});
}

TEST_F(ExportPlanTest, ConfigsThatCannotBeUsed) {
  cut(5, 2);
  EXPECT_FALSE(architectures_of("[]"));
  EXPECT_FALSE(architectures_of("{"));
  expect_error(Errc::invalid_argument, {"'groups'"}, R"({"architectures": ["LlamaForCausalLM"]})");
  const auto with_head_dim = [](const std::string& value) {
    return std::string(kConfig).replace(std::string(kConfig).find("\"head_dim\": 3"), 13, "\"head_dim\": " + value);
  };
  expect_error(Errc::invalid_argument, {"llama:", "'head_dim' is to be a number, and is of type 'string'"},
               with_head_dim("\"3\"").c_str());
  expect_error(Errc::invalid_argument, {"'head_dim' is to be a number, and is of type 'array'"},
               with_head_dim("[3]").c_str());
  // As one that is not there: hidden_size / num_attention_heads is no whole number.
  expect_error(Errc::invalid_argument, {"linear_qkv"}, with_head_dim("null").c_str());
}

TEST_F(ExportPlanTest, NumbersThatOnlyPythonWrites) {
  cut(5, 2);
  const std::string more = R"({"limits": [0.0, Infinity, -Infinity, NaN], "named \"NaN\\": "Infinity", )";
  const auto made = plan((more + (kConfig + 1)).c_str());
  ASSERT_TRUE(made) << made.error().to_string();
  expect_right(*made);
  const std::string texts = R"({"architectures": ["NaN \" -Infinity", "\\", "Infinity"]})";
  EXPECT_EQ(architectures_of(texts).value(), (std::vector<std::string>{"NaN \" -Infinity", "\\", "Infinity"}));
  EXPECT_FALSE(architectures_of("{\"architectures\": [Infinite]}"));
  EXPECT_FALSE(architectures_of("{\"architectures\": \"\\"));
}

TEST_F(ExportPlanTest, LengthsOfTextsAndLists) {
  for (const char* pattern : {"\"M*-\"", "[\"mamba\", 1, 2]"}) {
    auto mine = parse_family(
        "name = \"mine\"\narchitectures = [\"LlamaForCausalLM\"]\ninherits = \"llama\"\n"
        "[sizes]\nhd = \"pattern.length\"",
        "mine");
    ASSERT_TRUE(mine) << mine.error().to_string();
    pages_ = {*std::move(mine)};
    cut(5, 2);
    const std::string config = std::string(kConfig).replace(std::string(kConfig).find("\"head_dim\": 3"), 13,
                                                            "\"pattern\": " + std::string(pattern));
    const auto made = plan(config.c_str());
    ASSERT_TRUE(made) << made.error().to_string();
    expect_right(*made);
  }
}

TEST_F(ExportPlanTest, PiecesThatCannotBe) {
  cut(5, 1);
  shards_[0].push_back(shards_[0][0]);
  shards_[0].back().key = std::string(2000, 'x');
  expect_error(Errc::invalid_argument, {"2000 bytes"});
  shards_[0].pop_back();
  shards_[0][0].offset[0] = 100;
  expect_error(Errc::out_of_range, {shards_[0][0].key});
  shards_[0][0].offset.clear();
  expect_error(Errc::invalid_argument, {shards_[0][0].key});
}

TEST_F(ExportPlanTest, MemoryThatIsTooSmall) {
  cut(5, 1);
  const auto made = plan();
  ASSERT_TRUE(made);
  std::vector<std::byte> target(1 << 12);
  const ExportCopy& copy = made->copies.front();
  EXPECT_FALSE(apply_on_host(*made, copy, Dtype::f32, {}, target));
  const auto source = std::as_bytes(std::span(memory_[copy.rank][copy.piece]));
  EXPECT_FALSE(apply_on_host(*made, copy, Dtype::f32, source, std::span(target).first(3)));
  EXPECT_TRUE(apply_on_host(*made, copy, Dtype::f32, source, target));
}

TEST(ShardJson, IsReadAndChecked) {
  const auto shard = parse_shard(
      R"({"rank": 3, "pieces": [{"key": "a", "dtype": "BF16", "global_shape": [4], "offset": [2], "shape": [2]}]})",
      "f");
  ASSERT_TRUE(shard) << shard.error().to_string();
  EXPECT_EQ(shard->first, 3u);
  EXPECT_EQ(shard->second.front().offset, Shape{2});
  for (
      const char* text :
      {"", "[]", "{}", R"({"rank": -1, "pieces": []})", R"({"rank": 1, "pieces": {}})", R"({"rank": 1, "pieces": [1]})",
       R"({"rank": 1, "pieces": [{"key": "a"}]})",
       R"({"rank": 1, "pieces": [{"key": "a", "dtype": "X", "global_shape": [], "offset": [], "shape": []}]})",
       R"({"rank": 1, "pieces": [{"key": "a", "dtype": "F32", "global_shape": [-1], "offset": [0], "shape": [1]}]})"}) {
    EXPECT_FALSE(parse_shard(text, "f")) << text;
  }
}

}  // namespace
}  // namespace deltasync::exporting
