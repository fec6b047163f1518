// What a kind of target claims beyond the core (receiver/targets/capabilities.hpp): each does what it claims. Over the
// kinds of target_places.hpp, and once more over the relay's. Commits and their rollback are in
// test_target_conformance.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <stop_token>

#include "format/tiling.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/host_memory.hpp"
#include "tests/receiver/target_conformance.hpp"

#ifdef DELTASYNC_TEST_RELAY
#include "tests/receiver/targets/segment/relay_kinds.hpp"
#else
#include "tests/receiver/target_places.hpp"
#endif

namespace deltasync::test {
namespace {

class TargetCapability : public TargetConformance {
 protected:
  TargetCapabilities can() { return target_->capabilities(); }
  const Layout& layout() const { return *trainer_->layout(); }
  std::vector<std::uint64_t> all_tiles() const {
    std::vector<std::uint64_t> tiles(static_cast<std::size_t>(layout().tile_count()));
    std::iota(tiles.begin(), tiles.end(), std::uint64_t{0});
    return tiles;
  }
  std::size_t row_bytes(const Tile& tile) const {
    return static_cast<std::size_t>(tile.rect.cols) * layout().tensors()[tile.tensor].element_bytes;
  }
  /// The tile's rows, one after the other.
  std::vector<std::byte> packed(const Reference& reference, const Tile& tile) const {
    const Tensor& tensor = layout().tensors()[tile.tensor];
    std::vector<std::byte> rows(tile.rect.rows * row_bytes(tile));
    for (std::uint64_t row = 0; row < tile.rect.rows; ++row) {
      std::memcpy(rows.data() + row * row_bytes(tile),
                  reference.half.data() + tensor.offset + (tile.rect.row + row) * tensor.row_bytes() +
                      tile.rect.col * tensor.element_bytes,
                  row_bytes(tile));
    }
    return rows;
  }
  std::vector<std::byte> packed(const TileRows& rows, const Tile& tile) const {
    std::vector<std::byte> copy(tile.rect.rows * row_bytes(tile));
    for (std::uint64_t row = 0; row < tile.rect.rows; ++row) {
      std::memcpy(copy.data() + row * row_bytes(tile), rows.first + row * rows.row_stride, row_bytes(tile));
    }
    return copy;
  }
  Status repair(std::uint64_t index, std::vector<std::byte> rows) {
    const Tile tile = tile_of(layout(), index);
    DS_TRY(can().repair->begin_repair(in_time()));
    DS_TRY(can().repair->repair_tile(tile, {rows.data(), row_bytes(tile)}));
    return can().repair->end_repair();
  }
};

TEST_P(TargetCapability, ClaimsStayAsTheyAre) {
  const TargetCapabilities at_first = can();
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_EQ(can(), at_first);
  fill_full(*target_, first);
  ASSERT_TRUE(ok(target_->commit_full(first.state, in_time())));
  EXPECT_EQ(can(), at_first);
  const Reference second = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  EXPECT_EQ(can(), at_first);
  if (!can().in_live_memory) return;
  EXPECT_NE(can().rollback, nullptr);
  EXPECT_NE(can().slices, nullptr);
  EXPECT_NE(can().digests, nullptr);
  EXPECT_NE(can().repair, nullptr);
}

TEST_P(TargetCapability, AnInvalidatedVersionIsGone) {
  target_->invalidate();
  EXPECT_TRUE(holds_nothing());
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  target_->invalidate();
  EXPECT_TRUE(holds_nothing());
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_whole(*target_, second)));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetCapability, SlicesAreKeptOrRefused) {
  const TileSet whole = TileSet::whole(layout());
  const TileSet part = *TileSet::make(layout(), {{1, layout().tile_count() / 2}});
  const std::unique_ptr<Place> place = GetParam().make();
  auto made = place->make(trainer_->layout());
  ASSERT_TRUE(made.ok()) << made.error().to_string();
  Target& fresh = **made;
  CanKeepSlices* const slices = fresh.capabilities().slices;
  ASSERT_EQ(slices != nullptr, can().slices != nullptr);
  if (slices == nullptr) {
    EXPECT_EQ(kept_tiles(fresh), nullptr);
    EXPECT_TRUE(ok(subscribe(fresh, whole)));
    EXPECT_TRUE(fails(subscribe(fresh, part), Errc::unsupported));
    return;
  }
  EXPECT_TRUE(fails(can().slices->subscribe(*can().slices->kept()), Errc::invalid_argument)) << "it is open";
  const Status subscribed = slices->subscribe(part);
  if (!subscribed.ok()) {
    EXPECT_TRUE(fails(subscribed, Errc::invalid_argument));
    EXPECT_TRUE(ok(slices->subscribe(*slices->kept())));
    return;
  }
  EXPECT_EQ(slices->kept()->digest(), part.digest());
  ASSERT_TRUE(ok(fresh.open(pool_, in_time())));
  const Reference first = trainer_->now();
  TargetState state{first.state.version, {}, std::vector<std::uint64_t>(first.state.digests.size())};
  ASSERT_TRUE(ok(fresh.begin_full(FullUpdatePolicy::stage, in_time())));
  for (std::uint64_t i = 0; i < part.tiles(); ++i) {
    state.digests[part.nth(i)] = first.state.digests[part.nth(i)];
    ASSERT_TRUE(ok(put_from_half(fresh, first, tile_of(layout(), part.nth(i)))));
  }
  state.root = part.root(state.digests);
  ASSERT_TRUE(ok(fresh.commit_full(state, in_time())));
  EXPECT_TRUE(attest(fresh, in_time())->empty());
  std::vector<std::byte> scratch;
  for (std::uint64_t i = 0; i < part.tiles(); ++i) {
    const Tile tile = tile_of(layout(), part.nth(i));
    EXPECT_EQ(packed(*fresh.live_tile(tile, scratch), tile), packed(first, tile));
  }
}

TEST_P(TargetCapability, DigestsAreThoseOfWhatIsLive) {
  if (can().digests == nullptr) return;
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  const std::vector<std::uint64_t> all = all_tiles();
  std::vector<std::uint64_t> digests(all.size());
  ASSERT_TRUE(ok(can().digests->live_digests(all, digests, in_time())));
  EXPECT_EQ(digests, second.state.digests);
  const std::vector<std::uint64_t> some{1, 4, all.back()};
  digests.assign(some.size(), 0);
  ASSERT_TRUE(ok(can().digests->live_digests(some, digests, in_time())));
  for (std::size_t i = 0; i < some.size(); ++i) EXPECT_EQ(digests[i], second.state.digests[some[i]]);
  if (can().devices != nullptr) return;  // one that is idle may answer sooner than it is stopped
  std::stop_source stop;
  stop.request_stop();
  digests.resize(all.size());
  EXPECT_TRUE(
      fails(can().digests->live_digests(all, digests, CallContext(in_time(), stop.get_token())), Errc::cancelled));
}

TEST_P(TargetCapability, CopiesThatAreRightAreRight) {
  if (can().copies == nullptr) return;
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(ok(can().copies->prepare_copies(in_time())));
  ASSERT_TRUE(ok(can().copies->prepare_copies(in_time())));
  const auto wrong = can().copies->wrong_copies(all_tiles(), in_time());
  ASSERT_TRUE(wrong.ok()) << wrong.error().to_string();
  EXPECT_TRUE(wrong->empty());
}

TEST_P(TargetCapability, SingleTilesArePutWhereTheyLie) {
  if (can().repair == nullptr) return;
  std::vector<std::byte> scratch;
  EXPECT_TRUE(fails(can().repair->begin_repair(in_time()), Errc::not_found));
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  for (const std::uint64_t index : {std::uint64_t{0}, layout().tile_count() / 2, layout().tile_count() - 1}) {
    const std::vector<std::byte> right = packed(first, tile_of(layout(), index));
    std::vector<std::byte> wrong = right;
    wrong.front() ^= std::byte{1};
    wrong.back() ^= std::byte{0x80};
    ASSERT_TRUE(ok(repair(index, wrong)));
    const auto found = attest(*target_, in_time());
    ASSERT_TRUE(found.ok()) << found.error().to_string();
    ASSERT_EQ(found->size(), 1u) << "it is what was put, and nothing else has changed";
    EXPECT_EQ(found->front().tile, index);
    const Tile tile = tile_of(layout(), index);
    EXPECT_EQ(packed(*target_->live_tile(tile, scratch), tile), wrong) << "it is read from elsewhere";
    ASSERT_TRUE(ok(repair(index, right)));
    EXPECT_TRUE(attest(*target_, in_time())->empty());
    EXPECT_TRUE(holds(first));
  }
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetCapability, WhatIsAsleepComesBack) {
  if (can().sleep == nullptr) return;
  std::vector<std::byte> scratch;
  EXPECT_TRUE(fails(can().sleep->restore(in_time()), Errc::not_found));
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  const Tile tile = tile_of(layout(), layout().tile_count() / 2);
  EXPECT_EQ(packed(*can().sleep->kept_tile(tile, scratch), tile), packed(second, tile));
  ASSERT_TRUE(ok(can().sleep->release(in_time())));
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_TRUE(fails(target_->begin_full(FullUpdatePolicy::stage, in_time()), Errc::invalid_argument));
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  ASSERT_TRUE(ok(can().sleep->restore(in_time())));
  EXPECT_TRUE(holds(second));
  const Reference third = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_delta(second, third)));
  EXPECT_TRUE(holds(third));
}

TEST_P(TargetCapability, DecodedChangesAreTakenWhereTheyAreKept) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.02);
  std::vector<StagedStep> steps;
  steps.push_back(trainer_->delta(first, second));
  ResolvedBudget budget(std::uint64_t{1} << 40);
  std::vector<std::uint64_t> digests = first.state.digests;
  std::size_t decoded = 0;
  std::size_t kept = 0;
  for (StagedFrame& frame : steps[0].frames) {
    ASSERT_TRUE(ok(verify_frame(*target_, frame, first.state.digests, digests, budget)));
    decoded += frame.resolved.empty() && frame.kept.empty() ? 0 : 1;
    kept += frame.kept.size();
  }
  EXPECT_EQ(decoded != 0, can().takes_decoded);
  EXPECT_EQ(kept != 0, can().resolve != nullptr);
  ASSERT_TRUE(ok(target_->commit_delta(std::move(steps), second.state, in_time())));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetCapability, RowsThatAreLentAreTheUpdates) {
  if (can().rows == nullptr) return;
  for (int i = 0; i < 2; ++i) {  // over nothing, and over a version
    EXPECT_EQ(can().rows->full_rows(0), nullptr) << "no update is open";
    const Reference next = trainer_->step(0.5);
    ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
    for (std::uint32_t tensor = 0; tensor < layout().tensors().size(); ++tensor) {
      const Tensor& of = layout().tensors()[tensor];
      std::byte* const rows = can().rows->full_rows(tensor);
      if (of.bytes == 0) continue;
      ASSERT_NE(rows, nullptr);
      std::memcpy(rows, next.half.data() + of.offset, static_cast<std::size_t>(of.bytes));
    }
    ASSERT_TRUE(ok(target_->commit_full(next.state, in_time())));
    EXPECT_TRUE(holds(next));
  }
}

TEST_P(TargetCapability, MemoryIsSharedWhileAnUpdateLandsThere) {
  if (can().shared == nullptr) return;
  const auto shares = [this] { return can().shared->shares_memory(); };
  EXPECT_FALSE(shares());
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_TRUE(shares()) << "nothing was there: it goes to its final place";
  fill_full(*target_, first);
  ASSERT_TRUE(ok(target_->commit_full(first.state, in_time())));
  EXPECT_FALSE(shares());
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_FALSE(shares()) << "it is staged";
  target_->discard_full();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::in_place, in_time())));
  EXPECT_TRUE(shares());
  target_->discard_full();
  EXPECT_FALSE(shares());
}

TEST_P(TargetCapability, LentTilesAreReadWhereTheyAre) {
  if (can().borrow == nullptr) return;
  const Reference first = trainer_->now();
  const TileSet& kept = *can().slices->kept();
  constexpr std::uint64_t kAlignment = RegisteredHostMemory::kTileAlignment;
  std::vector<std::uint64_t> at{0};
  for (std::uint64_t i = 0; i < kept.tiles(); ++i) {
    const Tile tile = tile_of(layout(), kept.nth(i));
    at.push_back((at.back() + tile.rect.rows * row_bytes(tile) + kAlignment - 1) / kAlignment * kAlignment);
  }
  auto memory = HostMemory::map(at.back(), pool_, in_time());
  ASSERT_TRUE(memory.ok());
  for (std::uint64_t i = 0; i < kept.tiles(); ++i) {
    const auto rows = packed(first, tile_of(layout(), kept.nth(i)));
    std::copy(rows.begin(), rows.end(), memory->span().begin() + static_cast<std::ptrdiff_t>(at[i]));
  }
  auto lent = can().borrow->lend(memory->span(), {}, in_time());
  ASSERT_TRUE(lent.ok()) << lent.error().to_string();
  ASSERT_NE(*lent, nullptr);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  for (std::uint64_t begin = 0; begin < kept.tiles();) {
    std::uint64_t end = begin + 1;
    while (end < kept.tiles() && at[end + 1] - at[begin] <= (*lent)->lot_bytes()) ++end;
    ASSERT_TRUE(ok(can().borrow->put_lent(**lent, begin, end, memory->span().data() + at[begin])));
    begin = end;
  }
  ASSERT_TRUE(ok(target_->commit_full(first.state, in_time())));
  EXPECT_TRUE((*lent)->end());
  EXPECT_TRUE(holds(first));
}

TEST_P(TargetCapability, WaitsForADeviceEndWithThePull) {
  if (can().devices == nullptr) return;
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Tile tile = tile_of(layout(), 0);
  std::vector<std::byte> scratch;
  std::stop_source stop;
  stop.request_stop();
  can().devices->begin_pull(CallContext(in_time(), stop.get_token()));
  const auto late = target_->live_tile(tile, scratch);
  can().devices->end_pull();
  // One that is idle answers sooner; one that is busy is in test_target_device_faults.cpp.
  EXPECT_TRUE(late.ok() || late.error().code() == Errc::cancelled);
  EXPECT_TRUE(target_->live_tile(tile, scratch).ok());
  EXPECT_TRUE(ok(can().devices->wait_for_engine(in_time())));
  EXPECT_TRUE(ok(can().devices->finish_live(in_time())));
  EXPECT_TRUE(holds(first));
}

TEST_P(TargetCapability, WhatIsHandedOnIsServed) {
  if (can().hand_on == nullptr) return;
  EXPECT_TRUE(fails(can().hand_on->wait_served(in_time()), Errc::invalid_argument)) << "nothing is committed";
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  EXPECT_TRUE(ok(can().hand_on->wait_served(in_time())));
  EXPECT_TRUE(holds(first));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  EXPECT_TRUE(ok(can().hand_on->wait_served(in_time())));
  EXPECT_TRUE(holds(second));
}

INSTANTIATE_TEST_SUITE_P(Kinds, TargetCapability, testing::ValuesIn(kinds()),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace deltasync::test
