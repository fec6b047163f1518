// Deltas that are kept for the agent after this one: as files, and who may use them.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "agent/versions/kept_delta.hpp"
#include "agent/versions/ring_keeper.hpp"
#include "shm/side_files.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kMuch = 1u << 30;
constexpr std::chrono::milliseconds kEnough = std::chrono::hours(1);

/// A trainer's versions, the deltas between them, and the segment's place.
class KeptDeltas : public ::testing::Test {
 protected:
  void SetUp() override {
    digests_.resize(model_.layout->tile_count());
    delta::half_digests(*model_.layout, model_.half, digests_, pool_);
    root_ = delta::root_digest(digests_);
    touch_segment(segment_);
  }

  void touch_segment(const shm::SegmentPath& segment) { dir_.write(segment.name, "a segment"); }

  RingEntryPtr step() {
    const auto half = model_.half;
    const auto digests = digests_;
    const Version from = now_;
    test::mutate(model_.half, *model_.layout, 0.02, from.id.number);
    now_ = {{7, from.id.number + 1}, "step_" + std::to_string(from.id.number + 1)};
    auto delta = delta::encode(*model_.layout, half, model_.half, digests_, {from.id, now_.id, root_}, pool_);
    root_ = delta.to_root;
    return RingEntry::make(std::move(delta), from, now_, 0.1, changed_digests(digests, digests_));
  }
  std::vector<RingEntryPtr> steps(int n) {
    std::vector<RingEntryPtr> ring;
    for (int i = 0; i < n; ++i) ring.push_back(step());
    return ring;
  }
  /// What a keeper leaves of this ring.
  void keep(const std::vector<RingEntryPtr>& ring, std::uint64_t bytes_max = kMuch) {
    RingKeeper keeper;
    keeper.start();
    keeper.keep(segment_, ring, bytes_max);
    keeper.stop(kEnough);
  }
  std::vector<RingEntryPtr> adopt() {
    RingKeeper keeper;
    return keeper.adopt(segment_, *model_.layout, now_.id, root_, digests_);
  }
  std::size_t files() const { return shm::find_side_files(segment_).size(); }

  test::TempDir dir_;
  shm::SegmentPath segment_{dir_.path(), "job.g3"};
  ThreadPool pool_{2, "test"};
  test::TestModel model_ = test::make_model(3);
  std::vector<std::uint64_t> digests_;
  Digest128 root_;
  Version now_{{7, 1}, "first"};
};

std::vector<std::byte> file_of(const RingEntry& entry) {
  std::vector<std::byte> bytes = kept_delta_head(entry);
  for (const delta::Frame& frame : entry.delta->frames) {
    bytes.insert(bytes.end(), frame.bytes.begin(), frame.bytes.end());
  }
  return bytes;
}

void expect_same(const RingEntry& a, const RingEntry& b) {
  EXPECT_EQ(a.from, b.from);
  EXPECT_EQ(a.to, b.to);
  EXPECT_EQ(a.frame_hashes, b.frame_hashes);
  EXPECT_EQ(a.bytes(), b.bytes());
  EXPECT_EQ(delta::to_container(*a.delta), delta::to_container(*b.delta));
  ASSERT_EQ(a.before.size(), b.before.size());
  for (std::size_t i = 0; i < a.before.size(); ++i) {
    EXPECT_EQ(a.before[i].tile, b.before[i].tile);
    EXPECT_EQ(a.before[i].digest, b.before[i].digest);
  }
}

TEST_F(KeptDeltas, AFileIsReadAsItWasWritten) {
  const auto entry = step();
  const auto read = delta::decode_kept_delta(file_of(*entry), *model_.layout);
  ASSERT_TRUE(read) << read.error().to_string();
  expect_same(*entry_of(*read), *entry);
}

TEST_F(KeptDeltas, WhatIsTornOrChangedIsRefused) {
  const auto entry = step();
  auto bytes = file_of(*entry);
  for (std::size_t n = 0; n < bytes.size(); n += n < 300 ? 1 : 997) {
    EXPECT_FALSE(delta::decode_kept_delta(ByteSpan(bytes).first(n), *model_.layout)) << n;
  }
  for (std::size_t at = 0; at < bytes.size(); at += at < 300 ? 1 : 997) {
    bytes[at] ^= std::byte{4};
    EXPECT_FALSE(delta::decode_kept_delta(bytes, *model_.layout)) << at;
    bytes[at] ^= std::byte{4};
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(delta::decode_kept_delta(bytes, *model_.layout));
  auto specs = test::sample_specs();
  specs.push_back({"one.more", Dtype::bf16, {4096, 4096}, {}, {}});
  const auto other = Layout::build(std::move(specs)).value();
  EXPECT_EQ(delta::decode_kept_delta(file_of(*entry), *other).error().code(), Errc::layout_mismatch);
}

TEST_F(KeptDeltas, TheNextAgentHasTheRing) {
  const auto ring = steps(4);
  keep(ring);
  struct stat info {};
  ASSERT_EQ(::stat(shm::side_file_path(segment_, 1).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  for (int agent = 0; agent < 2; ++agent) {
    const auto adopted = adopt();
    ASSERT_EQ(adopted.size(), 4u) << "of agent " << agent;
    for (std::size_t i = 0; i < ring.size(); ++i) expect_same(*adopted[i], *ring[i]);
  }
}

TEST_F(KeptDeltas, FilesFollowTheRing) {
  auto ring = steps(3);
  RingKeeper keeper;
  keeper.start();
  keeper.keep(segment_, ring, kMuch);
  ring.erase(ring.begin());
  ring.push_back(step());
  keeper.keep(segment_, ring, kMuch);
  keeper.stop(kEnough);
  EXPECT_EQ(files(), 3u);
  EXPECT_EQ(adopt().size(), 3u);
}

/// Who was told which ring there is removes and adds no file but what differs.
TEST_F(KeptDeltas, WhatWasAdoptedIsKeptAsItIs) {
  auto ring = steps(3);
  keep(ring);
  const auto before = shm::find_side_files(segment_);
  RingKeeper keeper;
  keeper.start();
  auto adopted = keeper.adopt(segment_, *model_.layout, now_.id, root_, digests_);
  ASSERT_EQ(adopted.size(), 3u);
  adopted.erase(adopted.begin());
  adopted.push_back(step());
  keeper.keep(segment_, adopted, kMuch);
  keeper.stop(kEnough);
  const auto after = shm::find_side_files(segment_);
  ASSERT_EQ(after.size(), 3u);
  EXPECT_EQ(after[0].path, before[0].path) << "the newest was written first";
  EXPECT_EQ(after[1].path, before[1].path);
  EXPECT_EQ(adopt().size(), 3u);
}

/// A version came and the agent died before its delta was written; or another release published meanwhile.
TEST_F(KeptDeltas, AChainThatEndsElsewhereIsIgnored) {
  keep(steps(3));
  step();
  EXPECT_TRUE(adopt().empty());
  EXPECT_EQ(files(), 0u) << "nobody can use them any more";
}

TEST_F(KeptDeltas, AChainReachesBackAsFarAsItIsWhole) {
  keep(steps(4));
  std::filesystem::resize_file(shm::side_file_path(segment_, 3), 1000);  // the second oldest
  dir_.write("job.g3.d9", "no delta");
  dir_.write("job.g3.dx", "of somebody else");
  EXPECT_EQ(adopt().size(), 2u);
  EXPECT_EQ(files(), 2u);
  EXPECT_TRUE(std::filesystem::exists(dir_.path() / "job.g3.dx"));
}

/// All hashes are right, but the digests before are not those of the version that it says it comes from.
TEST_F(KeptDeltas, DigestsThatAreNotTrueEndTheChain) {
  auto ring = steps(3);
  auto lying = std::make_shared<RingEntry>(*ring[1]);
  lying->before[0].digest ^= 1;
  ring[1] = lying;
  keep(ring);
  const auto adopted = adopt();
  ASSERT_EQ(adopted.size(), 1u);
  expect_same(*adopted[0], *ring[2]);
}

TEST_F(KeptDeltas, ALinkIsNotFollowed) {
  keep(steps(1));
  const auto file = shm::side_file_path(segment_, 1);
  std::filesystem::rename(file, dir_.path() / "elsewhere");
  std::filesystem::create_symlink(dir_.path() / "elsewhere", file);
  EXPECT_TRUE(adopt().empty());
}

/// Of more, the newest are of use: what is older leads nowhere without them.
TEST_F(KeptDeltas, NoMoreThanTheRingsOwnBytes) {
  const auto ring = steps(3);
  keep(ring, ring[2]->bytes() - 1);
  EXPECT_EQ(files(), 0u);
  keep(ring, ring[1]->bytes() + ring[2]->bytes());
  EXPECT_EQ(files(), 2u);
  const auto adopted = adopt();
  ASSERT_EQ(adopted.size(), 2u);
  expect_same(*adopted[0], *ring[1]);
}

/// An agent's end waits for this: the thread leaves what it is at, and who stops it writes as much as there is time
/// for.
TEST_F(KeptDeltas, WhatIsPendingAtTheEndIsWrittenIfThereIsTime) {
  const auto ring = steps(3);
  RingKeeper hurried;
  hurried.keep(segment_, ring, kMuch);
  hurried.stop(std::chrono::milliseconds(0));
  EXPECT_EQ(files(), 0u);
  RingKeeper keeper;
  keeper.keep(segment_, ring, kMuch);
  keeper.stop(kEnough);
  EXPECT_EQ(files(), 3u);
  EXPECT_EQ(adopt().size(), 3u);
}

/// A state that was repaired is nothing that a file could describe.
TEST_F(KeptDeltas, RepairedOnesAreNotKept) {
  auto ring = steps(2);
  auto repaired = std::make_shared<RingEntry>(*ring[0]);
  repaired->from_former.push_back({});
  ring[0] = repaired;
  keep(ring);
  EXPECT_EQ(adopt().size(), 1u);
}

/// Who removed the segment ended before it came to them.
TEST_F(KeptDeltas, ThoseWithoutASegmentAreFound) {
  keep(steps(2));
  dir_.write("job.dx", "no side file");
  dir_.write("job.d1", "of no segment");
  dir_.write("other.g1.d7", "of another agent");
  const auto found = [&] {
    std::vector<std::string> names;
    const auto strays = shm::find_stray_side_files(dir_.path()).value();
    for (const auto& stray : strays) {
      names.push_back(stray.agent_name + " " + stray.path.filename().string());
    }
    return names;
  };
  EXPECT_EQ(found(), std::vector<std::string>({"other other.g1.d7"}));
  std::filesystem::remove(dir_.path() / segment_.name);
  EXPECT_EQ(found(), std::vector<std::string>({"job job.g3.d1", "job job.g3.d2", "other other.g1.d7"}));
  EXPECT_FALSE(shm::find_stray_side_files(dir_.path() / "none"));
}

TEST_F(KeptDeltas, TheyGoWithTheSegment) {
  keep(steps(2));
  EXPECT_EQ(files(), 2u);
  ASSERT_TRUE(shm::Segment::unlink(segment_));
  EXPECT_EQ(files(), 0u);
  keep(steps(1));
  EXPECT_EQ(files(), 0u) << "there is no segment that it could belong to";
}

}  // namespace
}  // namespace deltasync::agent
