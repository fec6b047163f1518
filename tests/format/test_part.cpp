// Parts of a layout: the same tiles under other numbers, and every lie in an encoding refused.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "format/coverage.hpp"
#include "format/part.hpp"
#include "format/tiling.hpp"
#include "random_specs.hpp"

namespace deltasync {
namespace {

using testing::HasSubstr;
using testing_support::RandomSpecs;

using Members = std::vector<std::pair<std::string, std::string>>;
const Members kTwo = {{"a", "host-a:7070"}, {"b", "host-b:7070"}};

LayoutPtr build(std::vector<TensorSpec> specs) {
  auto layout = Layout::build(std::move(specs));
  EXPECT_TRUE(layout.ok()) << layout.error().to_string();
  return *std::move(layout);
}

TensorSpec spec(std::string name, std::vector<std::uint64_t> shape) {
  return {.name = std::move(name), .dtype = Dtype::bf16, .shape = std::move(shape)};
}

/// Rows 0..600 and 1400..2000 of `w`, columns 100..200 of `c`, all of `n`.
struct Example {
  std::vector<TensorSlice> held = {{0, {0, 0, 300, 700}},
                                   {0, {300, 0, 300, 700}},
                                   {0, {1400, 0, 600, 700}},
                                   {1, {0, 100, 5000, 100}},
                                   {2, {0, 0, 1, 64}}};
  LayoutPtr whole;
  LayoutPtr layout;
  Sidecar sidecar;

  Example() {
    std::vector<TensorSpec> specs = {spec("w", {2000, 700}), spec("c", {5000, 1000}), spec("n", {64})};
    EXPECT_TRUE(add_cuts(specs, std::span(held).subspan(2)).ok());
    EXPECT_TRUE(add_cuts(specs, std::vector<TensorSlice>{{0, {0, 0, 600, 700}}}).ok());
    whole = build(std::move(specs));
    auto made = make_part(whole, make_sidecar(*whole), held, kTwo, 1);
    EXPECT_TRUE(made.ok()) << made.error().to_string();
    std::tie(layout, sidecar) = *std::move(made);
  }
};

TEST(Part, HasATensorForEachRectangle) {
  const Example example;
  const auto tensors = example.layout->tensors();
  ASSERT_EQ(tensors.size(), 4u) << "neighbours are one";
  EXPECT_EQ(tensors[0].spec.name, "w rows 0..600");
  EXPECT_EQ(tensors[1].spec.name, "w rows 1400..2000");
  EXPECT_EQ(tensors[2].spec.name, "c columns 100..200");
  EXPECT_EQ(tensors[3].spec.name, "n");
  EXPECT_EQ(tensors[2].rows, 5000u);
  EXPECT_EQ(tensors[2].cols, 100u);
  const auto in_part = [&](const TensorSlice& slice) {
    return slices_in_part(example.sidecar, *example.layout, std::vector{slice});
  };
  const auto slices = in_part({0, {1500, 10, 2, 20}});
  ASSERT_TRUE(slices.ok());
  EXPECT_EQ(slices->at(0).tensor, 1u);
  EXPECT_EQ(slices->at(0).rect, (Rect{100, 10, 2, 20}));
  const auto outside = in_part({0, {590, 0, 20, 700}});
  ASSERT_FALSE(outside.ok());
  EXPECT_EQ(outside.error().code(), Errc::out_of_range);
  EXPECT_THAT(outside.error().message(), HasSubstr("w rows 590..610"));
}

TEST(Part, TravelsInASidecar) {
  const Example example;
  const auto encoded = example.sidecar.encode();
  const auto decoded = Sidecar::decode(encoded, *example.layout);
  ASSERT_TRUE(decoded.ok()) << decoded.error().to_string();
  EXPECT_EQ(decoded->encode(), encoded);
  const auto part = decode_part(decoded->part, *example.layout);
  ASSERT_TRUE(part.ok());
  EXPECT_EQ(part->whole->digest(), example.whole->digest());
  EXPECT_EQ(part->members[1].endpoint, "host-b:7070");
  EXPECT_EQ(part->self, 1u);
  for (std::size_t cut = 0; cut < encoded.size(); ++cut) {
    EXPECT_FALSE(Sidecar::decode(ByteSpan(encoded).first(cut), *example.layout).ok()) << cut;
  }
  EXPECT_FALSE(Sidecar::decode(encoded, *example.whole).ok()) << "it is of another layout";
}

/// What a part is made of, with one thing wrong.
template <class Spoil>
void expect_refused(const Spoil& spoil, const std::string& text) {
  const Example example;
  auto part = decode_part(example.sidecar.part, *example.layout);
  ASSERT_TRUE(part.ok());
  spoil(*part);
  Sidecar sidecar;
  sidecar.part = encode_part(*part);
  const auto decoded = Sidecar::decode(sidecar.encode(), *example.layout);
  ASSERT_FALSE(decoded.ok()) << "accepted, expected: " << text;
  EXPECT_THAT(decoded.error().message(), HasSubstr(text));
}

TEST(Part, RefusesLies) {
  expect_refused([](Part& part) { part.origins[1].row = 1300; }, "has not the tiles of 'w'");
  expect_refused([](Part& part) { part.origins[1].row = 300; }, "has not the tiles of 'w'");
  expect_refused([](Part& part) { part.origins[1] = part.origins[0]; }, "written twice: w");
  expect_refused([](Part& part) { part.origins[1].row = 1401; }, "is not inside of 'w'");
  expect_refused([](Part& part) { part.origins[2].col = 101; }, "has not the tiles of 'c'");
  expect_refused([](Part& part) { part.origins[3].tensor = 3; }, "tensor 3 of 3");
  expect_refused([](Part& part) { std::swap(part.origins[0], part.origins[1]); }, "not sorted");
  expect_refused([](Part& part) { part.origins.pop_back(); }, "places 3 tensors");
  expect_refused([](Part& part) { part.self = 2; }, "member 2 of");
  expect_refused([](Part& part) { part.members[1].name = "a"; }, "two members are called 'a'");
  expect_refused([](Part& part) { part.members[0].endpoint.clear(); }, "member 'a'");
  expect_refused(
      [](Part& part) {
        Sidecar nested;
        nested.part = encode_part(part);
        part.sidecar = nested;
      },
      "format version 2");
}

TEST(Part, IsNotMadeOfWhatCannotBe) {
  const LayoutPtr whole = build({spec("w", {2000, 700})});
  const auto why = [&](std::vector<TensorSlice> held, Members members = kTwo, std::uint32_t self = 0) {
    const auto made = make_part(whole, Sidecar(), held, members, self);
    return made.ok() ? std::string("made") : made.error().message();
  };
  EXPECT_THAT(why({{0, {0, 0, 600, 700}}}), HasSubstr("w: a part ends at row 600, where the layout has no cut"));
  EXPECT_THAT(why({{0, {0, 0, 2000, 10}}}), HasSubstr("w: a part ends at column 10"));
  EXPECT_THAT(why({{0, {0, 0, 2000, 700}}, {0, {5, 0, 1, 1}}}), HasSubstr("written twice: w"));
  EXPECT_THAT(why({{0, {0, 0, 2001, 700}}}), HasSubstr("is not inside"));
  EXPECT_THAT(why({}), HasSubstr("holds nothing"));
  EXPECT_THAT(why({{0, {0, 0, 2000, 700}}}, kTwo, 2), HasSubstr("member 2 of 2"));
  EXPECT_EQ(why({{0, {0, 0, 2000, 700}}}), "made");
  std::vector<TensorSpec> specs = {spec("w", {2000, 700})};
  const auto cut = add_cuts(specs, std::vector<TensorSlice>{{0, {0, 0, 2001, 700}}});
  ASSERT_FALSE(cut.ok());
  EXPECT_THAT(cut.error().message(), HasSubstr("w: a part is not inside"));
}

TEST(Part, WhatTheWritersOfANodeHoldIsJoined) {
  const LayoutPtr whole = build({spec("w", {2000, 700}), spec("n", {64})});
  const auto joined = join_slices(*whole, std::vector<TensorSlice>{{1, {0, 0, 1, 64}},
                                                                   {0, {300, 0, 300, 700}},
                                                                   {0, {0, 0, 300, 350}},
                                                                   {0, {0, 350, 300, 350}},
                                                                   {0, {900, 0, 0, 700}},
                                                                   {0, {1400, 0, 600, 700}}});
  ASSERT_TRUE(joined.ok());
  ASSERT_EQ(joined->size(), 3u);
  EXPECT_EQ((*joined)[0].rect, (Rect{0, 0, 600, 700}));
  EXPECT_EQ((*joined)[1].rect, (Rect{1400, 0, 600, 700}));
  EXPECT_EQ((*joined)[2].tensor, 1u);
  const auto twice = join_slices(*whole, std::vector<TensorSlice>{{0, {0, 0, 20, 700}}, {0, {10, 0, 20, 700}}});
  ASSERT_FALSE(twice.ok());
  EXPECT_THAT(twice.error().message(), HasSubstr("written twice: w rows 10..20"));
}

TEST(Part, NodesHoldTheWholeLayoutOrAreNamed) {
  const LayoutPtr whole = build({spec("w", {2000, 700}), spec("n", {64}), spec("empty", {0, 3})});
  using Nodes = std::vector<std::pair<std::string, std::vector<TensorSlice>>>;
  const auto why = [&](const Nodes& nodes) {
    const Status held = check_nodes(*whole, nodes);
    return held ? std::string("held") : std::string(to_string(held.error().code())) + ": " + held.error().message();
  };
  const TensorSlice n{1, {0, 0, 1, 64}};
  EXPECT_EQ(why({{"a", {{0, {0, 0, 1200, 700}}, n}}, {"b", {{0, {800, 0, 1200, 700}}, n}}}), "held") << "replicas";
  EXPECT_EQ(why({{"a", {{0, {0, 0, 600, 700}}, n}}, {"b", {{0, {700, 0, 1300, 700}}}}}),
            "coverage: no node holds w rows 600..700 (a holds w rows 0..600; b holds w rows 700..2000)");
  EXPECT_EQ(why({{"a", {{0, {0, 0, 2000, 700}}}}}), "coverage: no node holds n");
  EXPECT_EQ(why({{"a", {n, {0, {0, 0, 2000, 300}}, {0, {0, 400, 2000, 300}}}}}),
            "coverage: no node holds w columns 300..400 (a holds w columns 0..300 and more)");
  EXPECT_THAT(why({{"a", {{0, {0, 0, 2001, 700}}}}}), HasSubstr("node a: "));
  Nodes many;
  for (std::uint64_t i = 0; i < 20; ++i) many.push_back({"n" + std::to_string(i), {{0, {i, 0, 1, 700}}}});
  EXPECT_THAT(why(many), HasSubstr("n7 holds w rows 7..8; 12 more hold parts)"));
}

/// Divides a rectangle at random into `pieces` or fewer.
std::vector<Rect> divide(RandomSpecs& random, const Rect& rect, unsigned pieces) {
  std::vector<Rect> rects = {rect};
  for (unsigned i = 1; i < pieces; ++i) {
    Rect& one = rects[random.below(rects.size())];
    Rect other = one;
    if (random.below(2) == 0 && one.rows > 1) {
      one.rows = 1 + random.below(one.rows - 1);
      other.row += one.rows;
      other.rows -= one.rows;
    } else if (one.cols > 1) {
      one.cols = 1 + random.below(one.cols - 1);
      other.col += one.cols;
      other.cols -= one.cols;
    } else {
      continue;
    }
    rects.push_back(other);
  }
  return rects;
}

/// However a layout is divided among nodes, each tile of it is one of one node, the same rectangle with the same dtype.
TEST(Part, TilesAreThoseOfTheWhole) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    RandomSpecs random(seed);
    std::vector<TensorSpec> specs = random.list(5);
    specs.push_back(spec("large", {3000 + random.below(3000), 90 + random.below(200)}));
    const LayoutPtr plain = build(specs);
    std::vector<std::vector<TensorSlice>> nodes(1 + random.below(4));
    std::vector<TensorSlice> all;
    for (std::uint32_t t = 0; t < plain->tensors().size(); ++t) {
      const Tensor& tensor = plain->tensors()[t];
      if (tensor.tile_count == 0) continue;
      for (const Rect& rect : divide(random, {0, 0, tensor.rows, tensor.cols}, 6)) {
        nodes[random.below(nodes.size())].push_back({t, rect});
        all.push_back({t, rect});
      }
    }
    ASSERT_TRUE(add_cuts(specs, all).ok());
    const LayoutPtr whole = build(specs);
    std::set<std::uint64_t> seen;
    Members members;
    for (std::size_t n = 0; n < nodes.size(); ++n) members.emplace_back("n" + std::to_string(n), "h:1");
    std::uint64_t bytes = 0;
    for (std::uint32_t n = 0; n < nodes.size(); ++n) {
      if (nodes[n].empty()) continue;
      auto made = make_part(whole, make_sidecar(*whole), nodes[n], members, n);
      ASSERT_TRUE(made.ok()) << "seed " << seed << ": " << made.error().to_string();
      const auto& [layout, sidecar] = *made;
      const auto part = decode_part(sidecar.part, *layout);
      ASSERT_TRUE(part.ok()) << part.error().to_string();
      const auto map = PartMap::build(layout, *part);
      ASSERT_TRUE(map.ok());
      bytes += layout->model_bytes();
      for (std::uint64_t t = 0; t < layout->tile_count(); ++t) {
        const std::uint64_t there = map->tile_in_whole(t);
        ASSERT_TRUE(seen.insert(there).second) << "seed " << seed << ": twice";
        ASSERT_EQ(map->tile_in_part(there), t);
        const Tile mine = tile_of(*layout, t);
        const Tile tile = tile_of(*whole, there);
        const TensorSlice place = map->slice_in_whole({mine.tensor, mine.rect});
        ASSERT_EQ(place.tensor, tile.tensor);
        ASSERT_EQ(place.rect, tile.rect);
      }
      const auto mine = slices_in_part(sidecar, *layout, nodes[n]);
      ASSERT_TRUE(mine.ok()) << mine.error().to_string();
      for (std::size_t i = 0; i < mine->size(); ++i) {
        ASSERT_EQ(map->slice_in_whole((*mine)[i]).rect, nodes[n][i].rect);
      }
    }
    EXPECT_EQ(seen.size(), whole->tile_count()) << "seed " << seed;
    EXPECT_EQ(bytes, whole->model_bytes());
  }
}

}  // namespace
}  // namespace deltasync
