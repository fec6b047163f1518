#include "export/quantisation.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace deltasync::exporting {
namespace {

using Specs = std::vector<TensorSpec>;

constexpr const char* kWeight = "model.layers.0.mlp.down_proj.weight";
constexpr const char* kBlocks = R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})";
constexpr const char* kPowers =
    R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}})";
constexpr const char* kTensor = R"({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}})";

TensorSpec spec(const std::string& name, Dtype dtype, std::vector<std::uint64_t> shape) {
  return {.name = name, .dtype = dtype, .shape = std::move(shape)};
}

Specs with_scale(const std::string& end, Dtype dtype, std::vector<std::uint64_t> shape) {
  return {spec("model.norm.weight", Dtype::bf16, {300}), spec(kWeight, Dtype::f8_e4m3, {300, 200}),
          spec(kWeight + end, dtype, std::move(shape))};
}

Specs blocks(Dtype dtype = Dtype::f32) {
  return with_scale("_scale_inv", dtype, {3, 2});
}

Result<Quantisation> read(const std::string& config, const Specs& specs) {
  return quantisation_of(nlohmann::json::parse(config), *Layout::build(specs).value());
}

std::string compressed(const std::string& weights, const std::string& more = "") {
  return R"({"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*gate"])" + more +
         R"(, "config_groups": {"group_0": {"targets": ["Linear"], "weights": )" + weights + "}}}}";
}

void expect_refused(const std::string& config, const Specs& specs, Errc code, const std::vector<std::string>& says) {
  const auto made = read(config, specs);
  ASSERT_FALSE(made) << config;
  EXPECT_EQ(made.error().code(), code) << made.error().to_string();
  for (const std::string& text : says) {
    EXPECT_NE(made.error().to_string().find(text), std::string::npos) << text << " in " << made.error().to_string();
  }
}

QuantisedTensor the_one(const std::string& config, const Specs& specs) {
  const auto made = read(config, specs);
  EXPECT_TRUE(made) << made.error().to_string();
  return made && made->tensors.size() == 1 ? made->tensors.front() : QuantisedTensor{};
}

TEST(Quantisation, NoneIsNone) {
  const auto made = read("{}", {spec("w", Dtype::bf16, {4, 4})});
  ASSERT_TRUE(made);
  EXPECT_TRUE(made->tensors.empty());
}

TEST(Quantisation, Blocks) {
  const QuantisedTensor plain{1, 2, true, 128, 128, false};
  const QuantisedTensor powers{1, 2, true, 128, 128, true};
  EXPECT_EQ(the_one(kBlocks, blocks()), plain);
  EXPECT_EQ(the_one(kBlocks, blocks(Dtype::bf16)), plain);
  EXPECT_EQ(the_one(kBlocks, blocks(Dtype::f8_e8m0)), powers);
  EXPECT_EQ(the_one(kPowers, blocks()), powers);
  EXPECT_EQ(the_one(kPowers, blocks(Dtype::f8_e8m0)), powers);
  const std::string text = std::string(R"({"text_config": )") + kBlocks + "}";
  EXPECT_EQ(the_one(text, blocks()), plain);
  const std::string weights = R"({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]})";
  EXPECT_EQ(the_one(compressed(weights), with_scale("_scale", Dtype::bf16, {3, 2})), plain);
}

TEST(Quantisation, OneScaleForATensor) {
  const QuantisedTensor whole{1, 2, false, 300, 200, false};
  const std::string weights = R"({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true})";
  for (const std::string& config : {std::string(kTensor), compressed(weights)}) {
    EXPECT_EQ(the_one(config, with_scale("_scale", Dtype::f32, {})), whole);
    EXPECT_EQ(the_one(config, with_scale("_scale", Dtype::bf16, {1})), whole);
  }
}

TEST(Quantisation, ScalesOfWhatLayersReadAreKept) {
  Specs specs = with_scale("_scale", Dtype::f32, {});
  specs.push_back(spec("model.layers.0.mlp.down_proj.input_scale", Dtype::f32, {}));
  specs.push_back(spec("model.layers.0.mlp.other.input_scale", Dtype::f32, {}));
  const auto made = read(kTensor, specs);
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_EQ(made->activations, std::vector<std::uint32_t>{3});
}

TEST(Quantisation, OtherFormatsAreRefusedByName) {
  for (const std::string method : {"awq", "gptq", "mxfp4", "modelopt", "fbgemm_fp8", "bitsandbytes"}) {
    expect_refused(R"({"quantization_config": {"quant_method": ")" + method + R"("}})",
                   {spec("w", Dtype::bf16, {4, 4})}, Errc::unsupported, {"'" + method + "'", "fp8"});
  }
  const std::pair<const char*, const char*> weights[] = {
      {R"({"num_bits": 4, "type": "int", "strategy": "group"})", "int4 of 'group_0'"},
      {R"({"num_bits": 4, "type": "float", "strategy": "tensor_group"})", "float4 of 'group_0'"},
      {R"({"num_bits": 8, "type": "float", "strategy": "channel"})", "strategy 'channel'"},
      {R"({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": false})", "asymmetric"},
      {R"({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": true})", "dynamic"},
      {"null", "without weights"}};
  for (const auto& [said, why] : weights) expect_refused(compressed(said), blocks(), Errc::unsupported, {why});
  expect_refused(R"({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}})", blocks(), Errc::unsupported,
                 {"e5m2"});
  expect_refused(R"({"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}})", blocks(),
                 Errc::unsupported, {"ue8m0"});
  expect_refused(R"({"quantization_config": {}})", blocks(), Errc::unsupported, {"'none'"});
  expect_refused(R"({"quantization_config": []})", blocks(), Errc::unsupported, {"'none'"});
  expect_refused(R"({"quantization_config": {"quant_method": "compressed-tensors"}})", blocks(), Errc::unsupported,
                 {"groups"});
  const std::string two = compressed(R"({"num_bits": 8, "type": "float", "strategy": "tensor"}}, "group_1": {"weights":
      {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]})");
  expect_refused(two, blocks(), Errc::unsupported, {"group_1"});
}

TEST(Quantisation, SizesOfBlocksThatAreNone) {
  for (const std::string size : {"[128]", "[0, 128]", "[128, -1]", "128", "[128, 1e9]", "[\"128\", 128]"}) {
    expect_refused(R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": )" + size + "}}", blocks(),
                   Errc::layout_mismatch, {"weight_block_size", "two sizes"});
  }
}

TEST(Quantisation, WhatTheDirectoryHasOtherwiseIsNamed) {
  expect_refused("{}", blocks(), Errc::layout_mismatch, {kWeight, "no quantization_config"});
  expect_refused(kBlocks, {spec("w", Dtype::bf16, {4, 4})}, Errc::layout_mismatch, {"no tensor of F8_E4M3"});
  expect_refused(kBlocks, {spec("w", Dtype::f8_e4m3, {4, 4})}, Errc::layout_mismatch, {"w_scale_inv"});
  Specs both = blocks();
  both.push_back(spec(std::string(kWeight) + "_scale", Dtype::f32, {3, 2}));
  expect_refused(kBlocks, both, Errc::layout_mismatch, {kWeight, "two tensors of scales"});
  expect_refused(kBlocks, with_scale("_scale_inv", Dtype::f32, {2, 3}), Errc::layout_mismatch,
                 {"_scale_inv has [2, 3]", "128 x 128", "[3, 2]"});
  expect_refused(kBlocks, with_scale("_scale", Dtype::f32, {1}), Errc::layout_mismatch, {"weight_scale has [1]"});
  expect_refused(kTensor, blocks(), Errc::layout_mismatch, {"_scale_inv has [3, 2]", "one scale"});
  expect_refused(kBlocks, blocks(Dtype::f16), Errc::unsupported, {"_scale_inv", "F16"});
  expect_refused(kTensor, with_scale("_scale", Dtype::f8_e8m0, {1}), Errc::unsupported, {"F8_E8M0"});
  expect_refused(kBlocks, {spec("w", Dtype::f8_e4m3, {2, 4, 4}), spec("w_scale_inv", Dtype::f32, {2, 1, 1})},
                 Errc::unsupported, {"w [2, 4, 4]"});
}

TEST(Quantisation, ModulesThatAreNotToBeQuantised) {
  const auto config = [](const std::string& key, const std::string& module) {
    return R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], ")" + key +
           R"(": ["x", ")" + module + R"("]}})";
  };
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore"}) {
    for (const char* module : {"model.layers.0.mlp.down_proj", "down_proj", "model", "layers.0", kWeight}) {
      expect_refused(config(key, module), blocks(), Errc::layout_mismatch, {kWeight, std::string("'") + module + "'"});
    }
    for (const char* module : {"down", "layers.0.mlp.down", "model.layers.0.mlp.down_proj.weight_scale_inv", "re:.*"}) {
      EXPECT_TRUE(read(config(key, module), blocks())) << module;
    }
  }
}

/// Two ranks have the upper and the lower part of "w"; rank 0 has "scales", too, if `scales`.
Result<ExportPlan> plan(const Specs& specs, const std::string& more = "", bool scales = false) {
  DS_ASSIGN(const Family page,
            parse_family("name = \"mine\"\n[[rows]]\nmcore = \"w\"\nhf = \"w.weight\"\n" + more, "mine"));
  std::vector<std::vector<ShardPiece>> shards(2);
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    shards[rank].push_back({"w", Dtype::bf16, {300, 200}, {rank * 100, 0}, {100 + rank * 100, 200}});
  }
  if (scales) shards[0].push_back({"scales", Dtype::f32, {3, 2}, {0, 0}, {3, 2}});
  return plan_export(page, kBlocks, Layout::build(specs).value(), shards);
}

Specs planned() {
  return {spec("w.weight", Dtype::f8_e4m3, {300, 200}), spec("w.weight_scale_inv", Dtype::f32, {3, 2}),
          spec("w.input_scale", Dtype::f32, {})};
}

TEST(Quantisation, OfAPlan) {
  const auto made = plan(planned());
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_EQ(made->quantised, (std::vector<QuantisedTensor>{{0, 1, true, 128, 128, false}}));
  EXPECT_EQ(made->constants, std::vector<std::uint32_t>{2});
  // The values: as of a tensor that is not quantised. Nothing for the scales.
  ASSERT_EQ(made->copies.size(), 2U);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(made->copies[rank].tensor, 0U);
    EXPECT_EQ(made->copies[rank].target_offset, rank * 100U * 200U);
    EXPECT_EQ(made->copies[rank].steps, (std::vector<CopyStep>{{(100 + rank * 100) * 200, 1, 1}}));
  }
  const std::string json = to_json(*made);
  for (const char* text : {"\"quantised\"", "\"formula\": \"block\"", "\"powers_of_two\": false"}) {
    EXPECT_NE(json.find(text), std::string::npos) << json;
  }
  std::vector<std::byte> memory(300 * 200 * 2);
  const Status applied = apply_on_host(*made, made->copies[0], Dtype::bf16, memory, memory);
  ASSERT_FALSE(applied);
  EXPECT_NE(applied.error().to_string().find("w.weight is quantised"), std::string::npos);
}

TEST(Quantisation, OfAPlanWithScalesOfNothing) {
  Specs specs = planned();
  specs.push_back(spec("x.weight", Dtype::f8_e4m3, {128, 128}));
  specs.push_back(spec("x.weight_scale_inv", Dtype::f32, {1, 1}));
  auto made = plan(specs);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().to_string().find("nothing is written to: x.weight, x.weight_scale_inv"), std::string::npos)
      << made.error().to_string();
  made = plan(specs, "[[constants]]\nhf = \"x.weight*\"\n");
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_EQ(made->quantised.size(), 1U);
  EXPECT_EQ(made->constants, (std::vector<std::uint32_t>{2, 3, 4}));
}

TEST(Quantisation, OfAPlanWhoseScalesARowWrites) {
  const auto made = plan(planned(), "[[rows]]\nmcore = \"scales\"\nhf = \"w.weight_scale_inv\"\n", true);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().to_string().find("w.weight_scale_inv is written twice"), std::string::npos)
      << made.error().to_string();
}

}  // namespace
}  // namespace deltasync::exporting
