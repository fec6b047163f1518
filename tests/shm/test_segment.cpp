// Creating, attaching, and refusing what is not a whole and valid segment of ours.
#include <fcntl.h>
#include <gmock/gmock-matchers.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

#include "base/hash.hpp"
#include "shm/support.hpp"
#include "shm/validate.hpp"

namespace deltasync::shm::testing {
namespace {

using ::testing::HasSubstr;

std::string text_of(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class SegmentFile : public ::testing::Test {
 protected:
  SegmentPath path() const { return {dir_.path(), "model.g1"}; }
  std::filesystem::path file() const { return dir_.path() / "model.g1"; }

  /// Changes bytes of the file behind everyone's back.
  template <class F>
  void patch(F&& change) {
    auto* at = static_cast<ControlBlock*>(static_cast<void*>(control_.data()));
    std::fstream f(file(), std::ios::in | std::ios::out | std::ios::binary);
    f.read(control_.data(), static_cast<std::streamsize>(control_.size()));
    change(*at);
    f.seekp(0);
    f.write(control_.data(), static_cast<std::streamsize>(control_.size()));
  }
  void expect_refused(Errc code, const std::string& words) {
    const auto refused = Segment::attach(path());
    ASSERT_FALSE(refused.ok()) << "expected: " << words;
    EXPECT_EQ(refused.error().code(), code) << refused.error().to_string();
    EXPECT_THAT(refused.error().message(), HasSubstr(words));
    EXPECT_THAT(refused.error().message(), HasSubstr(file().string()));
  }

  TempDir dir_;
  std::vector<char> control_ = std::vector<char>(kControlBytes);
};

TEST_F(SegmentFile, CreateThenAttachSeesTheSame) {
  auto made = create(path()).value();
  EXPECT_EQ(made->half_bytes(), kHalfBytes);
  EXPECT_EQ(made->generation(), 1u);
  auto seen = Segment::attach(path());
  ASSERT_TRUE(seen.ok()) << seen.error().to_string();
  auto& other = **seen;
  EXPECT_EQ(text_of(other.layout_encoded()), "layout");
  EXPECT_EQ(text_of(other.sidecar_encoded()), "the sidecar");
  EXPECT_EQ(other.layout_digest(), some_digest());
  EXPECT_EQ(other.half_bytes(), kHalfBytes);
  EXPECT_EQ(other.generation(), 1u);
  for (unsigned h = 0; h < kHalves; ++h) {
    EXPECT_EQ(other.half_file_offset(h) % kHalfAlignment, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(other.half(h).data()) % 4096, 0u);
    EXPECT_TRUE(half_is(other, h, 0)) << "a new segment is zero";
    fill_half(*made, h, static_cast<std::uint8_t>(h + 1));
    EXPECT_TRUE(half_is(other, h, static_cast<std::uint8_t>(h + 1)));
    std::byte byte{};
    EXPECT_EQ(::pread(other.file(), &byte, 1, static_cast<off_t>(other.half_file_offset(h) + kHalfBytes - 1)), 1);
    EXPECT_EQ(byte, std::byte(h + 1));
  }
  struct stat st {};
  ASSERT_EQ(::stat(file().c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  EXPECT_GE(static_cast<std::uint64_t>(st.st_blocks) * 512, static_cast<std::uint64_t>(st.st_size)) << "pages missing";
}

TEST_F(SegmentFile, ModeDoesNotDependOnTheUmask) {
  const auto before = ::umask(0377);
  auto made = create(path());
  ::umask(before);
  ASSERT_TRUE(made.ok()) << made.error().to_string();
  EXPECT_TRUE(Segment::attach(path()).ok());
}

TEST(SegmentInShm, LivesUnderDevShm) {
  const SegmentPath path{"/dev/shm", "deltasync-test-" + std::to_string(::getpid())};
  (void)Segment::unlink(path);
  auto made = create(path);
  if (!made.ok() && made.error().code() == Errc::no_space) GTEST_SKIP() << made.error().to_string();
  ASSERT_TRUE(made.ok()) << made.error().to_string();
  EXPECT_EQ(create(path).error().code(), Errc::already_exists);
  auto seen = Segment::attach(path);
  ASSERT_TRUE(seen.ok()) << seen.error().to_string();
  fill_half(**made, 1, 9);
  EXPECT_TRUE(half_is(**seen, 1, 9));
  EXPECT_TRUE(Segment::unlink(path).ok());
  EXPECT_EQ(Segment::attach(path).error().code(), Errc::not_found);
  EXPECT_TRUE(half_is(**seen, 1, 9)) << "mappings outlive the name";
}

TEST_F(SegmentFile, EmptyLayoutAndLargeSizes) {
  ASSERT_TRUE(create({dir_.path(), "empty"}, 0).ok());
  auto empty = Segment::attach({dir_.path(), "empty"});
  ASSERT_TRUE(empty.ok()) << empty.error().to_string();
  EXPECT_EQ((*empty)->half(1).size(), 0u);
  EXPECT_EQ(create({dir_.path(), "vast"}, std::uint64_t{1} << 60).error().code(), Errc::out_of_range);
  EXPECT_EQ(create({dir_.path(), "large"}, std::uint64_t{1} << 42).error().code(), Errc::no_space);
  EXPECT_FALSE(std::filesystem::exists(dir_.path() / "large"));
  // Offsets stay exact far beyond 32 bits.
  const auto plan = plan_segment(std::uint64_t{1} << 42, 1000, 1000, std::uint64_t{1} << 20);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->half_offset[1] - plan->half_offset[0], std::uint64_t{1} << 42);
  EXPECT_EQ(plan->segment_bytes - plan->half_offset[1], std::uint64_t{1} << 42);
}

TEST_F(SegmentFile, NamesThatArePaths) {
  for (const auto* name : {"", "a/b", "..", ".hidden", "a b", "x\n"}) {
    EXPECT_EQ(create({dir_.path(), name}).error().code(), Errc::invalid_argument) << name;
    EXPECT_EQ(Segment::attach({dir_.path(), name}).error().code(), Errc::invalid_argument) << name;
  }
  EXPECT_EQ(create({dir_.path(), std::string(201, 'a')}).error().code(), Errc::invalid_argument);
}

TEST_F(SegmentFile, AlreadyThereAndNotThere) {
  expect_refused(Errc::not_found, "No such file");
  auto made = create(path());
  EXPECT_EQ(create(path()).error().code(), Errc::already_exists);
  EXPECT_TRUE(Segment::attach(path()).ok()) << "the refused creation must not remove it";
  EXPECT_EQ(create({dir_.path() / "no", "s"}).error().code(), Errc::not_found);
}

TEST_F(SegmentFile, WrongModeAndKind) {
  ASSERT_TRUE(create(path()).ok());
  ASSERT_EQ(::chmod(file().c_str(), 0640), 0);
  expect_refused(Errc::permission, "0640");
  if (::geteuid() == 0) {
    ASSERT_EQ(::chmod(file().c_str(), 0600), 0);
    ASSERT_EQ(::chown(file().c_str(), 4711, static_cast<gid_t>(-1)), 0);
    expect_refused(Errc::permission, "user 4711");
  }
  ASSERT_TRUE(Segment::unlink(path()).ok());
  ASSERT_TRUE(create({dir_.path(), "elsewhere"}).ok());
  std::filesystem::create_symlink(dir_.path() / "elsewhere", file());
  EXPECT_FALSE(Segment::attach(path()).ok()) << "a link is not followed";
}

TEST_F(SegmentFile, WrongSizes) {
  ASSERT_TRUE(create(path()).ok());
  const auto whole = std::filesystem::file_size(file());
  for (const auto size : {whole - 1, whole - 4096, whole + 4096, std::uintmax_t{kControlBytes}}) {
    std::filesystem::resize_file(file(), size);
    expect_refused(Errc::corrupt, "segment_bytes");
  }
  for (const auto size : {std::uintmax_t{kControlBytes - 1}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(file(), size);
    expect_refused(Errc::corrupt, "file size");
  }
}

TEST_F(SegmentFile, AnUnfinishedSegmentIsNamedAsSuch) {
  ASSERT_TRUE(create(path()).ok());
  patch([](ControlBlock& b) { b.ready.word = 0; });
  expect_refused(Errc::corrupt, "never finished");
}

TEST_F(SegmentFile, EveryFlippedBitOfTheHeaderIsNoticed) {
  ASSERT_TRUE(create(path()).ok());
  std::vector<char> good(kControlBytes);
  std::ifstream(file(), std::ios::binary).read(good.data(), static_cast<std::streamsize>(good.size()));
  for (std::size_t byte = 0; byte < offsetof(ControlBlock, agent); ++byte) {
    if (byte >= offsetof(ControlBlock, ready) + 8) break;
    for (int bit = 0; bit < 8; ++bit) {
      auto bad = good;
      bad[byte] = static_cast<char>(bad[byte] ^ (1 << bit));
      std::fstream f(file(), std::ios::in | std::ios::out | std::ios::binary);
      f.write(bad.data(), static_cast<std::streamsize>(bad.size()));
      f.close();
      const auto refused = Segment::attach(path());
      ASSERT_FALSE(refused.ok()) << "byte " << byte << " bit " << bit;
      ASSERT_TRUE(refused.error().code() == Errc::corrupt || refused.error().code() == Errc::unsupported)
          << refused.error().to_string();
    }
  }
}

TEST_F(SegmentFile, AHeaderThatLiesWithAMatchingHash) {
  ASSERT_TRUE(create(path()).ok());
  const auto lie = [&](auto&& change, const std::string& words) {
    std::vector<char> good(kControlBytes);
    std::ifstream(file(), std::ios::binary).read(good.data(), static_cast<std::streamsize>(good.size()));
    patch([&](ControlBlock& b) {
      change(b.header);
      b.header.header_hash = header_hash(b.header);
    });
    expect_refused(Errc::corrupt, words);
    std::fstream(file(), std::ios::in | std::ios::out | std::ios::binary)
        .write(good.data(), static_cast<std::streamsize>(good.size()));
  };
  lie([](SegmentHeader& h) { h.half_bytes += kHalfAlignment; }, "half_offset[1]");
  lie([](SegmentHeader& h) { h.half_bytes = ~std::uint64_t{0}; }, "half_bytes");
  lie([](SegmentHeader& h) { h.layout_offset += 4096; }, "layout_offset");
  lie([](SegmentHeader& h) { h.layout_bytes = std::uint64_t{1} << 40; }, "half_bytes");
  lie([](SegmentHeader& h) { h.sidecar_bytes += kHalfAlignment; }, "progress_offset");
  lie([](SegmentHeader& h) { h.progress_offset -= 4096; }, "progress_offset");
  lie([](SegmentHeader& h) { h.progress_words += kHalfAlignment; }, "half_offset[0]");
  lie([](SegmentHeader& h) { h.progress_words = ~std::uint64_t{0}; }, "half_bytes");
  lie([](SegmentHeader& h) { h.sidecar_offset = 0; }, "sidecar_offset");
  lie([](SegmentHeader& h) { h.half_offset[1] = h.half_offset[0]; }, "half_offset[1]");
  lie([](SegmentHeader& h) { h.segment_bytes -= 1; }, "segment_bytes");
  lie([](SegmentHeader& h) { h.control_bytes = 64; }, "control_bytes");
  lie([](SegmentHeader& h) { h.metadata_hash ^= 1; }, "metadata_hash");
  lie([](SegmentHeader& h) { h.reserved[3] = 1; }, "header.reserved");
  EXPECT_TRUE(Segment::attach(path()).ok()) << "the test itself damaged the file";
}

TEST_F(SegmentFile, AnUnknownFormatIsUnsupported) {
  ASSERT_TRUE(create(path()).ok());
  patch([](ControlBlock& b) { b.header.format = 1; });
  expect_refused(Errc::unsupported, "format 1");
}

TEST_F(SegmentFile, DamagedMetadata) {
  ASSERT_TRUE(create(path()).ok());
  std::fstream f(file(), std::ios::in | std::ios::out | std::ios::binary);
  f.seekp(static_cast<std::streamoff>(plan_segment(kHalfBytes, 6, 11, kBatches)->layout_offset + 2));
  f.put('X');
  f.close();
  expect_refused(Errc::corrupt, "metadata_hash");
}

TEST_F(SegmentFile, DamagedStateWords) {
  ASSERT_TRUE(create(path()).ok());
  const auto with = [&](auto&& change, const std::string& words) {
    patch(change);
    expect_refused(Errc::corrupt, words);
  };
  with([](ControlBlock& b) { b.state[1].word = 0; }, "state[1]");
  // One flipped bit never makes another state.
  for (int bit = 56; bit < 64; ++bit) {
    with(
        [&](ControlBlock& b) {
          b.state[1].word = HalfWord{HalfState::free, 0}.pack() ^ std::uint64_t{1} << bit;
        },
        "state[1]");
  }
  with([](ControlBlock& b) { b.state[1].word = HalfWord{HalfState::active, 5}.pack(); }, "info[1].epoch");
  with([](ControlBlock& b) { b.info[1].words[kInfoEpoch] = 3; }, "info[1].writers");
  with([](ControlBlock& b) { b.info[1].words[kInfoWriters] = 65; }, "info[1].writers: 65");
  with(
      [](ControlBlock& b) {
        b.info[1].words[kInfoWriters] = 1;
        b.info[1].words[kInfoWords - 1] = ~std::uint64_t{0};
      },
      "info[1].label");
  with(
      [](ControlBlock& b) {
        b.info[1].words[kInfoWords - 1] = 0;
        b.state[1].word = HalfWord{HalfState::active, 0}.pack();
      },
      "sequence 0");
  patch([](ControlBlock& b) { b.state[1].word = HalfWord{HalfState::active, 5}.pack(); });
  EXPECT_TRUE(Segment::attach(path()).ok());
  with([](ControlBlock& b) { b.slot[7].phase ^= std::uint64_t{1} << 60; }, "slot[7].phase");
  patch([](ControlBlock& b) { b.slot[7].phase ^= std::uint64_t{1} << 60; });
  with([](ControlBlock& b) { b.owner[63].pid = std::uint64_t{1} << 40; }, "owner[63].pid");
}

TEST_F(SegmentFile, AdoptRefusesTwoActiveHalves) {
  ASSERT_TRUE(create(path()).ok());
  patch([](ControlBlock& b) {
    for (unsigned h = 0; h < kHalves; ++h) {
      b.state[h].word = HalfWord{HalfState::active, h + 1}.pack();
      b.info[h].words[kInfoEpoch] = b.info[h].words[kInfoNumber] = b.info[h].words[kInfoWriters] = 1;
    }
  });
  auto segment = Segment::attach(path()).value();
  const auto refused = AgentRole::adopt(*segment);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt);
}

TEST(Lock, ASecondAgentIsRefusedByPid) {
  TempDir dir;
  auto first = AgentLock::acquire(dir.path(), "model");
  ASSERT_TRUE(first.ok());
  // flock excludes open file descriptions, so this process stands for another as well.
  const auto second = AgentLock::acquire(dir.path(), "model");
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  EXPECT_THAT(second.error().message(), HasSubstr("pid " + std::to_string(::getpid())));
  EXPECT_TRUE(AgentLock::acquire(dir.path(), "other").ok());
  EXPECT_EQ(AgentLock::acquire(dir.path(), "../model").error().code(), Errc::invalid_argument);
  { auto moved = std::move(first).value(); }
  EXPECT_TRUE(AgentLock::acquire(dir.path(), "model").ok());
}

TEST(Lock, TheFileGoesWithItsOwnerIfToldSo) {
  TempDir dir;
  const auto file = dir.path() / "model.lock";
  { auto kept = AgentLock::acquire(dir.path(), "model"); }
  EXPECT_TRUE(std::filesystem::exists(file));
  {
    auto lock = AgentLock::acquire(dir.path(), "model");
    ASSERT_TRUE(lock.ok());
    lock->remove_on_release();
    EXPECT_TRUE(std::filesystem::exists(file));
  }
  EXPECT_FALSE(std::filesystem::exists(file));
}

// Whatever came to stand in the file, none of it is taken for more than it is.
TEST(Lock, ANoteIsForTheNextOwner) {
  TempDir dir;
  const auto file = dir.path() / "model.lock";
  {
    auto lock = AgentLock::acquire(dir.path(), "model").value();
    EXPECT_EQ(lock.note(), "");
    ASSERT_TRUE(lock.write_note("a line, longer than the next one"));
    ASSERT_TRUE(lock.write_note("a line"));
    EXPECT_EQ(lock.write_note("two\nlines").error().code(), Errc::invalid_argument);
    EXPECT_EQ(lock.write_note(std::string(10'000, 'a')).error().code(), Errc::invalid_argument);
    EXPECT_EQ(lock.note(), "a line");
    const auto second = AgentLock::acquire(dir.path(), "model");
    EXPECT_NE(second.error().message().find("pid " + std::to_string(::getpid()) + " holds"), std::string::npos)
        << second.error().message();
  }
  EXPECT_EQ(AgentLock::acquire(dir.path(), "model")->note(), "a line");
  {
    auto lock = AgentLock::acquire(dir.path(), "model").value();
    ASSERT_TRUE(lock.write_note(""));
  }
  EXPECT_EQ(AgentLock::acquire(dir.path(), "model")->note(), "");
  for (const std::string& left :
       {std::string(), std::string("12"), std::string("12\nno end"), std::string(9'000, '1')}) {
    std::ofstream(file, std::ios::trunc) << left;
    EXPECT_EQ(AgentLock::acquire(dir.path(), "model")->note(), "") << left.size();
  }
}

// A process that opened the file before it was removed must not take a lock on it for ownership.
TEST(Lock, HasOneOwnerAtATimeThoughEachRemovesTheFile) {
  TempDir dir;
  std::atomic<int> owners{0};
  std::atomic<int> most{0};
  std::vector<std::thread> agents;
  for (int i = 0; i < 4; ++i) {
    agents.emplace_back([&] {
      for (int owned = 0; owned < 100;) {
        auto lock = AgentLock::acquire(dir.path(), "model");
        if (!lock.ok()) continue;
        most = std::max(most.load(), ++owners);
        ++owned;
        std::this_thread::sleep_for(std::chrono::microseconds(50));  // so that another could be owner beside us
        lock->remove_on_release();
        --owners;
      }
    });
  }
  for (auto& agent : agents) agent.join();
  EXPECT_EQ(most, 1);
}

TEST(Lock, KnowsWhetherItsFileIsStillNamedAndRemovesNobodyElses) {
  const TempDir dir;
  const auto file = dir.path() / "model.lock";
  {
    auto lock = AgentLock::acquire(dir.path(), "model").value();
    lock.remove_on_release();
    EXPECT_TRUE(lock.in_place());
    std::filesystem::remove(file);
    EXPECT_FALSE(lock.in_place());
    const auto next = AgentLock::acquire(dir.path(), "model");
    ASSERT_TRUE(next.ok());
    EXPECT_FALSE(lock.in_place());
    EXPECT_TRUE(next->in_place());
  }
  EXPECT_TRUE(std::filesystem::exists(file));
}

TEST(Lock, OfAStrangerIsNamedWithItsOwnerAndNotBelieved) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving a file to another user needs root";
  const TempDir dir;
  const auto file = dir.path() / "model.lock";
  std::ofstream(file) << "1\n";  // a pid that the stranger wrote
  ASSERT_EQ(::chown(file.c_str(), 65534, 65534), 0);
  const UniqueFd strangers(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(strangers.get(), LOCK_EX), 0);
  const auto refused = AgentLock::acquire(dir.path(), "model");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::permission);
  EXPECT_THAT(refused.error().message(), HasSubstr(file.string() + " belongs to user 65534"));
  EXPECT_THAT(refused.error().message(), ::testing::Not(HasSubstr("pid 1")));
}

TEST_F(SegmentFile, OfAStrangerIsNamedWithItsOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving a file to another user needs root";
  static_cast<void>(create(path()).value());
  ASSERT_EQ(::chown(file().c_str(), 65534, 65534), 0);
  expect_refused(Errc::permission, "belongs to user 65534");
  const auto again = create(path());
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code(), Errc::already_exists);
  EXPECT_THAT(again.error().message(), HasSubstr("it belongs to user 65534"));
}

TEST_F(SegmentFile, IsAttachedByItsDescriptorWhateverBecameOfItsName) {
  auto made = create(path()).value();
  EXPECT_TRUE(made->in_place());
  std::filesystem::remove(file());
  EXPECT_FALSE(made->in_place());
  auto other = create(path()).value();
  auto seen = Segment::attach(made->hand_over().value(), path());
  ASSERT_TRUE(seen.ok()) << seen.error().to_string();
  made->half(0)[7] = std::byte{42};
  EXPECT_EQ((*seen)->half(0)[7], std::byte{42});
  EXPECT_NE(other->half(0)[7], std::byte{42});
  EXPECT_FALSE((*seen)->in_place());
  EXPECT_TRUE(made->remove_name());
  EXPECT_TRUE(std::filesystem::exists(file()));  // the other's
  EXPECT_TRUE(other->remove_name());
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST(Lock, EndsWithItsProcessHoweverItEnds) {
  TempDir dir;
  Child agent([&](const Child::Turns& turns) {
    auto lock = AgentLock::acquire(dir.path(), "model");
    turns.tell(lock.ok() ? 'y' : 'n');
    turns.expect('x');
    return 0;
  });
  agent.go();
  agent.expect('y');
  const auto pid = std::to_string(agent.pid());
  auto refused = AgentLock::acquire(dir.path(), "model");
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message(), HasSubstr("pid " + pid));
  agent.stop();
  EXPECT_FALSE(AgentLock::acquire(dir.path(), "model").ok()) << "a stopped agent is still the agent";
  agent.kill();
  EXPECT_TRUE(AgentLock::acquire(dir.path(), "model").ok());
}

// The file that was checked is the file that is mapped, though the name changes hands between.
TEST_F(SegmentFile, ANameThatChangesHands) {
  const SegmentPath other{dir_.path(), "model.g2"};
  ASSERT_TRUE(create(path()).ok());
  ASSERT_TRUE(create(other, 4 * kHalfBytes).ok());
  std::atomic<bool> stop{false};
  std::thread swapper([&] {
    const auto two = dir_.path() / other.name;
    while (!stop) ::renameat2(AT_FDCWD, file().c_str(), AT_FDCWD, two.c_str(), RENAME_EXCHANGE);
  });
  unsigned seen[2] = {0, 0};
  const auto deadline = soon();
  while ((seen[0] < 1000 || seen[1] < 1000) && !deadline.passed()) {
    const auto attached = Segment::attach(path());
    if (!attached.ok()) {
      ADD_FAILURE() << attached.error().to_string();
      break;
    }
    ++seen[(*attached)->half_bytes() == kHalfBytes ? 0 : 1];
  }
  stop = true;
  swapper.join();
  EXPECT_GE(seen[0], 1000u);
  EXPECT_GE(seen[1], 1000u);
}

}  // namespace
}  // namespace deltasync::shm::testing
