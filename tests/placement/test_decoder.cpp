// Decoder layers over tensor- and expert-parallel ranks, against a loader that writes what each engine parameter is by
// definition, element by element.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "format/tiling.hpp"
#include "placement/decoder.hpp"
#include "placement/host_executor.hpp"
#include "placement/regions.hpp"
#include "tests/placement/plan_fixture.hpp"

namespace deltasync {
namespace {

using placement::HostExecutor;
using test::Engine;
using testing::HasSubstr;

constexpr std::uint64_t kHidden = 48;
constexpr std::uint64_t kHeads = 8;
constexpr std::uint64_t kKvHeads = 2;
constexpr std::uint64_t kHeadDim = 6;
constexpr std::uint64_t kFfn = 40;
constexpr std::uint64_t kVocabulary = 90;
constexpr std::uint64_t kPadded = 128;
constexpr std::uint64_t kExperts = 5;
constexpr std::uint64_t kWidth = 2;

std::string expert_name(std::uint64_t e, const std::string& which) {
  return "mlp.experts." + std::to_string(e) + "." + which + ".weight";
}

std::vector<TensorSpec> decoder_specs() {
  std::vector<TensorSpec> specs;
  const auto add = [&](std::string name, std::vector<std::uint64_t> shape) {
    specs.push_back({std::move(name), Dtype::bf16, std::move(shape), {}, {}});
  };
  add("embed.weight", {kVocabulary, kHidden});
  add("norm.weight", {kHidden});
  add("q.weight", {kHeads * kHeadDim, kHidden});
  add("q.bias", {kHeads * kHeadDim});
  add("k.weight", {kKvHeads * kHeadDim, kHidden});
  add("k.bias", {kKvHeads * kHeadDim});
  add("v.weight", {kKvHeads * kHeadDim, kHidden});
  add("v.bias", {kKvHeads * kHeadDim});
  add("o.weight", {kHidden, kHeads * kHeadDim});
  add("gate.weight", {kFfn, kHidden});
  add("up.weight", {kFfn, kHidden});
  add("down.weight", {kHidden, kFfn});
  for (std::uint64_t e = 0; e < kExperts; ++e) {
    add(expert_name(e, "gate"), {kFfn, kHidden});
    add(expert_name(e, "up"), {kFfn, kHidden});
    add(expert_name(e, "down"), {kHidden, kFfn});
  }
  add("stacked.gate", {kExperts, kFfn, kHidden});
  add("stacked.up", {kExperts, kFfn, kHidden});
  add("stacked.down", {kExperts, kHidden, kFfn});
  add("lm_head.weight", {kVocabulary, kHidden});
  add("mtp.weight", {4, 4});
  return specs;
}

/// One rank's engine: its parameters, and for each element what HF element it is.
struct Rig {
  Rig(LayoutPtr the_layout, Rank tp_rank, Rank ep_rank)
      : layout(std::move(the_layout)), tp(tp_rank), ep(ep_rank), plan(layout, tp) {}

  using Source = std::function<std::optional<std::pair<std::uint64_t, std::uint64_t>>(std::uint64_t, std::uint64_t)>;

  std::uint32_t memory(const std::string& name, std::uint64_t elements) {
    return plan.add_memory(engine.add(name, elements * kWidth));
  }
  /// Row o, column i of memory `m` (with `pitch` elements a row, from element `from` on) is element (row, col) of
  /// `tensor`, as the loader has it.
  void expect(std::uint32_t m, std::uint64_t element, const std::string& tensor, std::uint64_t row, std::uint64_t col) {
    expected.push_back({m, element, tensor, row, col});
  }
  void check(const std::vector<std::byte>& half) {
    const auto built = plan.build();
    ASSERT_TRUE(built.ok()) << built.error().to_string();
    auto executor = HostExecutor::make(*built);
    ASSERT_TRUE(executor.ok());
    const TileSet& tiles = parts_of(**built).tiles;
    const Engine before = reference(half);
    for (std::uint64_t rank = 0; rank < tiles.tiles(); ++rank) {
      const Tile tile = tile_of(*layout, tiles.nth(rank));
      executor->scatter_tile(rank, test::tile_bytes(*layout, half, tile.index).data(), tile.rect.cols * kWidth);
    }
    EXPECT_EQ(engine.contents(), before.contents());
    rest_bytes = (*built)->rest_bytes();
  }
  Engine reference(const std::vector<std::byte>& half) const {
    Engine copy;
    const PlacementPlan made = plan.plan();
    for (const LiveMemory& memory : made.memories) static_cast<void>(copy.add(memory.name, memory.bytes));
    for (const Expected& e : expected) {
      const Tensor& t = layout->tensors()[*layout->find(e.tensor)];
      std::memcpy(copy.base(e.memory) + e.element * kWidth,
                  half.data() + t.offset + e.row * t.row_bytes() + e.col * kWidth, kWidth);
    }
    return copy;
  }

  struct Expected {
    std::uint32_t memory;
    std::uint64_t element;
    std::string tensor;
    std::uint64_t row;
    std::uint64_t col;
  };
  LayoutPtr layout;
  Rank tp;
  Rank ep;
  Engine engine;
  DecoderPlacement plan;
  std::vector<Expected> expected;
  std::uint64_t rest_bytes = 0;
};

void ok(const Status& status) {
  EXPECT_TRUE(status.ok()) << status.error().to_string();
}

/// Rows of `count` from `first` of a tensor to rows from `to` on of a row-major memory.
void expect_rows(Rig& rig, std::uint32_t m, std::uint64_t to, const std::string& tensor, std::uint64_t first,
                 std::uint64_t count, std::uint64_t cols) {
  for (std::uint64_t r = 0; r < count; ++r) {
    for (std::uint64_t c = 0; c < cols; ++c) rig.expect(m, (to + r) * cols + c, tensor, first + r, c);
  }
}

void place_attention(Rig& rig) {
  const std::uint64_t tp = rig.tp.count;
  const std::uint64_t q_rows = kHeads * kHeadDim / tp;
  const std::uint64_t kv_rows = std::max<std::uint64_t>(1, kKvHeads / tp) * kHeadDim;
  const std::uint64_t kv_first =
      (tp <= kKvHeads ? rig.tp.index * (kKvHeads / tp) : rig.tp.index / (tp / kKvHeads)) * kHeadDim;
  const std::uint64_t rows = q_rows + 2 * kv_rows;
  const auto qkv = rig.memory("qkv.weight", rows * kHidden);
  ok(rig.plan.qkv({"q.weight", {}}, {"k.weight", {}}, {"v.weight", {}}, kHeads, kKvHeads,
                  ParamView::dense(qkv, rows, kHidden, kWidth)));
  expect_rows(rig, qkv, 0, "q.weight", rig.tp.index * q_rows, q_rows, kHidden);
  expect_rows(rig, qkv, q_rows, "k.weight", kv_first, kv_rows, kHidden);
  expect_rows(rig, qkv, q_rows + kv_rows, "v.weight", kv_first, kv_rows, kHidden);

  const auto bias = rig.memory("qkv.bias", rows);
  ok(rig.plan.qkv({"q.bias", {}}, {"k.bias", {}}, {"v.bias", {}}, kHeads, kKvHeads,
                  ParamView::dense(bias, rows, 1, kWidth)));
  for (std::uint64_t i = 0; i < q_rows; ++i) rig.expect(bias, i, "q.bias", 0, rig.tp.index * q_rows + i);
  for (std::uint64_t i = 0; i < kv_rows; ++i) {
    rig.expect(bias, q_rows + i, "k.bias", 0, kv_first + i);
    rig.expect(bias, q_rows + kv_rows + i, "v.bias", 0, kv_first + i);
  }

  const std::uint64_t ins = kHeads * kHeadDim / tp;
  const auto o = rig.memory("o.weight", kHidden * ins);
  ok(rig.plan.in_part({"o.weight", {}}, ParamView::dense(o, kHidden, ins, kWidth)));
  for (std::uint64_t r = 0; r < kHidden; ++r) {
    for (std::uint64_t c = 0; c < ins; ++c) rig.expect(o, r * ins + c, "o.weight", r, rig.tp.index * ins + c);
  }
}

/// Up first, and down stored as in × out.
void place_mlp(Rig& rig) {
  const std::uint64_t part = kFfn / rig.tp.count;
  const std::uint64_t first = rig.tp.index * part;
  const auto gate_up = rig.memory("gate_up.weight", 2 * part * kHidden);
  ok(rig.plan.gate_up({"gate.weight", {}}, {"up.weight", {}}, ParamView::dense(gate_up, 2 * part, kHidden, kWidth),
                      GateUp::up_first));
  expect_rows(rig, gate_up, 0, "up.weight", first, part, kHidden);
  expect_rows(rig, gate_up, part, "gate.weight", first, part, kHidden);
  const auto down = rig.memory("down.weight", part * kHidden);
  ok(rig.plan.in_part({"down.weight", {}}, ParamView::dense_transposed(down, kHidden, part, kWidth)));
  for (std::uint64_t o = 0; o < kHidden; ++o) {
    for (std::uint64_t i = 0; i < part; ++i) rig.expect(down, i * kHidden + o, "down.weight", o, first + i);
  }
}

/// w13 [E, 2·part, hidden] and w2 [E, hidden, part]. `name` tells which HF tensor, and row, an expert's row is.
void place_experts(Rig& rig, const std::string& prefix, const std::vector<Expert>& experts,
                   const std::function<std::pair<std::string, std::uint64_t>(std::uint64_t, const char*)>& name) {
  const std::vector<std::uint64_t> local = consecutive_experts(kExperts, rig.ep);
  const std::uint64_t part = kFfn / rig.tp.count;
  const std::uint64_t first = rig.tp.index * part;
  const std::uint64_t places = local.size();
  if (places == 0) {
    for (const Expert& e : experts) {
      for (const Slice* s : {&e.gate, &e.up, &e.down}) ok(rig.plan.ignore(*s));
    }
    return;
  }
  const auto w13 = rig.memory(prefix + "w13", places * 2 * part * kHidden);
  const auto w2 = rig.memory(prefix + "w2", places * part * kHidden);
  const StackedView up{ParamView::dense(w13, 2 * part, kHidden, kWidth), 2 * part * kHidden * kWidth, places};
  const StackedView down{ParamView::dense(w2, kHidden, part, kWidth), part * kHidden * kWidth, places};
  ok(rig.plan.experts(experts, local, rig.tp, up, down));
  for (std::uint64_t e = 0; e < places; ++e) {
    const auto [gate, gate_row] = name(local[e], "gate");
    const auto [up_name, up_row] = name(local[e], "up");
    const auto [down_name, down_row] = name(local[e], "down");
    expect_rows(rig, w13, e * 2 * part, gate, gate_row + first, part, kHidden);
    expect_rows(rig, w13, e * 2 * part + part, up_name, up_row + first, part, kHidden);
    for (std::uint64_t o = 0; o < kHidden; ++o) {
      for (std::uint64_t i = 0; i < part; ++i) {
        rig.expect(w2, (e * kHidden + o) * part + i, down_name, down_row + o, first + i);
      }
    }
  }
}

/// Two memories: the embedding, and a head that is tied to it but kept apart. The HF head is not used.
void place_vocabulary(Rig& rig) {
  const std::uint64_t each = kPadded / rig.tp.count;
  const std::uint64_t first = std::min(rig.tp.index * each, kVocabulary);
  const std::uint64_t rows = std::min(first + each, kVocabulary) - first;
  for (const char* name : {"embed", "head"}) {
    const auto m = rig.memory(name, each * kHidden);
    ok(rig.plan.vocabulary({"embed.weight", {}}, kPadded, ParamView::dense(m, each, kHidden, kWidth)));
    expect_rows(rig, m, 0, "embed.weight", first, rows, kHidden);
  }
  ok(rig.plan.ignore({"lm_head.weight", {}}));
}

void place_all(Rig& rig) {
  place_vocabulary(rig);
  const auto norm = rig.memory("norm", kHidden);
  ok(rig.plan.whole({"norm.weight", {}}, ParamView::dense(norm, kHidden, 1, kWidth)));
  for (std::uint64_t i = 0; i < kHidden; ++i) rig.expect(norm, i, "norm.weight", 0, i);
  place_attention(rig);
  place_mlp(rig);
  place_experts(
      rig, "named.",
      named_experts("mlp.experts.{}.gate.weight", "mlp.experts.{}.up.weight", "mlp.experts.{}.down.weight", kExperts),
      [](std::uint64_t e, const char* which) { return std::pair(expert_name(e, which), std::uint64_t{0}); });
  std::vector<Expert> stacked;
  for (std::uint64_t e = 0; e < kExperts; ++e) {
    stacked.push_back({*row_slice(*rig.layout, "stacked.gate", e, kExperts),
                       *row_slice(*rig.layout, "stacked.up", e, kExperts),
                       *row_slice(*rig.layout, "stacked.down", e, kExperts)});
  }
  place_experts(rig, "stacked.", stacked, [](std::uint64_t e, const char* which) {
    const bool is_down = std::string(which) == "down";
    return std::pair("stacked." + std::string(which), e * (is_down ? kHidden : kFfn));
  });
  ok(rig.plan.ignore({"mtp.weight", {}}));
}

using Ranks = std::pair<std::uint64_t, std::uint64_t>;

class Decoder : public testing::TestWithParam<Ranks> {};

TEST_P(Decoder, EachRankHasWhatItsLoaderWouldWrite) {
  const auto [tp, ep] = GetParam();
  std::vector<TensorSpec> specs = decoder_specs();
  const test::TestModel model = test::make_model(9, specs);
  std::uint64_t rest_bytes = 0;
  for (std::uint64_t t = 0; t < tp; ++t) {
    for (std::uint64_t e = 0; e < ep; ++e) {
      SCOPED_TRACE("tp " + std::to_string(t) + " ep " + std::to_string(e));
      Rig rig(model.layout, {t, tp}, {e, ep});
      place_all(rig);
      rig.check(model.half);
      rest_bytes += rig.rest_bytes;
      ok(add_cuts(specs, slices_of(rig.plan.plan().slices)));
    }
  }
  EXPECT_EQ(rest_bytes != 0, tp * ep > 1) << "tensors of one tile are cut through by ranks";
  // With all ranks' cuts nobody has a rest.
  const test::TestModel cut = test::make_model(9, specs);
  for (std::uint64_t t = 0; t < tp; ++t) {
    for (std::uint64_t e = 0; e < ep; ++e) {
      Rig rig(cut.layout, {t, tp}, {e, ep});
      place_all(rig);
      rig.check(cut.half);
      EXPECT_EQ(rig.rest_bytes, 0u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Decoder,
                         testing::Values(Ranks{1, 1}, Ranks{2, 1}, Ranks{4, 1}, Ranks{8, 1}, Ranks{1, 2}, Ranks{2, 3},
                                         Ranks{1, 6}),
                         [](const auto& param_info) {
                           return "Tp" + std::to_string(param_info.param.first) + "Ep" +
                                  std::to_string(param_info.param.second);
                         });

// ---- errors
// ----------------------------------------------------------------------------------------------------------

class DecoderErrors : public testing::Test {
 protected:
  DecoderErrors() : rig_(*Layout::build(decoder_specs()), {1, 4}, {}) { m_ = rig_.memory("m", 4096); }

  static testing::AssertionResult refused(const Status& status, Errc code, const std::string& text) {
    if (status.ok()) return testing::AssertionFailure() << "accepted";
    if (status.error().code() != code || status.error().message().find(text) == std::string::npos) {
      return testing::AssertionFailure() << status.error().to_string();
    }
    return testing::AssertionSuccess();
  }
  ParamView view(std::uint64_t outs, std::uint64_t ins) const { return ParamView::dense(m_, outs, ins, kWidth); }

  Rig rig_;
  std::uint32_t m_ = 0;
};

TEST_F(DecoderErrors, NameTheTensor) {
  DecoderPlacement& plan = rig_.plan;
  const Errc bad = Errc::invalid_argument;
  EXPECT_TRUE(refused(plan.whole({"nothing", {}}, view(1, 1)), Errc::not_found, "nothing"));
  EXPECT_TRUE(refused(plan.ignore({"nothing", {}}), Errc::not_found, "nothing"));
  EXPECT_TRUE(refused(plan.whole({"q.weight", Rect{48, 0, 1, 1}}, view(1, 1)), Errc::out_of_range, "q.weight"));
  EXPECT_TRUE(refused(plan.whole({"norm.weight", {}}, view(kHidden - 1, 1)), bad, "norm.weight"));
  EXPECT_TRUE(refused(plan.out_part({"gate.weight", {}}, view(kFfn / 4, kHidden - 1)), bad, "gate.weight"));
  EXPECT_TRUE(refused(plan.out_part({"embed.weight", {}}, view(23, kHidden)), bad, "90 outputs"));
  EXPECT_TRUE(refused(plan.in_part({"norm.weight", {}}, view(12, 1)), bad, "'norm.weight' has no inputs to divide"));
  EXPECT_TRUE(refused(plan.in_part({"mtp.weight", Rect{0, 0, 4, 3}}, view(4, 1)), bad, "3 inputs"));
  EXPECT_TRUE(refused(plan.vocabulary({"embed.weight", {}}, 88, view(22, kHidden)), bad, "embed.weight"));
  EXPECT_TRUE(refused(plan.vocabulary({"embed.weight", {}}, 90, view(22, kHidden)), bad, "90 padded rows"));
  EXPECT_TRUE(refused(plan.vocabulary({"embed.weight", {}}, 96, view(23, kHidden)), bad, "24 padded rows"));
  EXPECT_TRUE(refused(plan.gate_up({"gate.weight", {}}, {"up.weight", {}}, view(21, kHidden)), bad, "gate.weight"));
  EXPECT_TRUE(refused(plan.gate_up({"gate.weight", {}}, {"up.weight", {}}, view(18, kHidden)), bad, "gate.weight"));
  const auto qkv = [&](std::uint64_t heads, std::uint64_t kv_heads, std::uint64_t outs) {
    return plan.qkv({"q.weight", {}}, {"k.weight", {}}, {"v.weight", {}}, heads, kv_heads, view(outs, kHidden));
  };
  EXPECT_TRUE(refused(qkv(6, 2, 24), bad, "q.weight"));  // 6 heads over 4 ranks
  EXPECT_TRUE(refused(qkv(20, 2, 24), bad, "48 outputs are not those of 20 heads"));
  EXPECT_TRUE(refused(qkv(8, 3, 24), bad, "3 key heads cannot be shared by 4 ranks"));
  EXPECT_TRUE(refused(qkv(8, 0, 24), bad, "k.weight"));
  EXPECT_TRUE(refused(qkv(8, 2, 25), bad, "v.weight"));
  EXPECT_TRUE(refused(qkv(8, 2, 23), bad, "v.weight"));
}

TEST_F(DecoderErrors, Experts) {
  const auto experts =
      named_experts("mlp.experts.{}.gate.weight", "mlp.experts.{}.up.weight", "mlp.experts.{}.down.weight", kExperts);
  const StackedView up{view(20, kHidden), 20 * kHidden * kWidth, 1};
  const StackedView down{view(kHidden, 10), kHidden * 10 * kWidth, 1};
  const std::vector<std::uint64_t> two{0, 1};
  StackedView two_down = down;
  two_down.count = 2;
  EXPECT_TRUE(refused(rig_.plan.experts(experts, std::vector<std::uint64_t>{0}, rig_.tp, up, two_down),
                      Errc::invalid_argument, "1 experts into 1 and 2"));
  const std::vector<std::uint64_t> beyond{5};
  EXPECT_TRUE(refused(rig_.plan.experts(experts, two, rig_.tp, up, down), Errc::invalid_argument, "2 experts into 1"));
  EXPECT_TRUE(refused(rig_.plan.experts(experts, beyond, rig_.tp, up, down), Errc::invalid_argument, "no expert 5"));
  EXPECT_TRUE(consecutive_experts(5, {2, 2}).empty());
  EXPECT_EQ(consecutive_experts(5, {0, 2}), (std::vector<std::uint64_t>{0, 1, 2}));
  EXPECT_EQ(consecutive_experts(5, {1, 2}), (std::vector<std::uint64_t>{3, 4}));
}

/// So that whatever is placed there is refused for its shape.
TEST_F(DecoderErrors, PartsBeyondAViewAreEmpty) {
  const ParamView whole = view(8, 6);
  EXPECT_EQ(whole.out_range(5, 3).outs, 3u);
  EXPECT_EQ(whole.out_range(5, 4).outs, 0u);
  EXPECT_EQ(whole.out_range(9, 0).outs, 0u);
  EXPECT_EQ(whole.out_range(9, ~std::uint64_t{0}).outs, 0u);
  EXPECT_EQ(whole.in_range(2, 4).ins, 4u);
  EXPECT_EQ(whole.in_range(2, 5).ins, 0u);
  EXPECT_EQ(whole.in_range(7, ~std::uint64_t{0}).ins, 0u);
}

TEST_F(DecoderErrors, NoSuchRank) {
  DecoderPlacement plan(rig_.layout, {4, 4});
  EXPECT_TRUE(refused(plan.out_part({"gate.weight", {}}, view(10, kHidden)), Errc::invalid_argument, "no rank 4"));
}

/// What no call speaks of is missed by build().
TEST_F(DecoderErrors, ForgottenTensors) {
  ok(rig_.plan.whole({"mtp.weight", {}}, view(4, 4)));
  const auto built = rig_.plan.build();
  ASSERT_FALSE(built.ok());
  EXPECT_EQ(built.error().code(), Errc::coverage);
  EXPECT_THAT(built.error().message(), HasSubstr("embed.weight"));
}

}  // namespace
}  // namespace deltasync
