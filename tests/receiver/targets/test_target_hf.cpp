// The directory target on disk: names, files, what a restarted receiver finds, what is removed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/deadline.hpp"
#include "receiver/targets/directory/hf_files.hpp"
#include "receiver/targets/directory/hf_record.hpp"
#include "tests/receiver/hf_case.hpp"

namespace deltasync::test {
namespace {
namespace fs = std::filesystem;

/// A mark that a patched file keeps and a new file has not (inode numbers would not do: they are given out again).
void mark(const fs::path& path) {
  fs::permissions(path, fs::perms::owner_all);
}
bool is_marked(const fs::path& path) {
  return fs::status(path).permissions() == fs::perms::owner_all;
}

void flip_byte(const fs::path& path, std::uint64_t offset) {
  std::vector<std::byte> bytes = read_file(path);
  bytes.at(offset) ^= std::byte{1};
  write_file(path, bytes);
}

class HfTargetTest : public testing::Test {
 protected:
  TempDir dir_;
  HfCase hf_{dir_.path() / "deep" / "out"};  // made with its parents
};

TEST_F(HfTargetTest, NamesAndRecords) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  EXPECT_EQ(fs::read_symlink(hf_.out() / "current"), "versions/1a2b3c4d5e6f7788-1");
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_EQ(fs::read_symlink(hf_.out() / "current"), "versions/1a2b3c4d5e6f7788-2");
  EXPECT_EQ(hf_.differs(), "");
  const std::vector<std::string> expected = {"1a2b3c4d5e6f7788-1", "1a2b3c4d5e6f7788-1.json", "1a2b3c4d5e6f7788-2",
                                             "1a2b3c4d5e6f7788-2.json"};
  EXPECT_EQ(hf_.entries(), expected);
  std::ifstream in(hf_.out() / "versions" / "1a2b3c4d5e6f7788-2.json");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto record = decode_record(text);
  ASSERT_TRUE(record.ok()) << record.error().to_string();
  EXPECT_EQ(record->version, hf_.held().state.version);
  EXPECT_EQ(record->root, hf_.held().state.root);
  EXPECT_EQ(record->layout, hf_.trainer().layout()->digest());
}

TEST_F(HfTargetTest, PatchesForwardWhenNobodyLooks) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  mark(hf_.weight_file());
  for (int i = 1; i <= 6; ++i) {
    ASSERT_TRUE(ok(hf_.delta()));
    ASSERT_EQ(hf_.differs(), "");
    EXPECT_EQ(is_marked(hf_.weight_file()), i % 2 == 0) << i;  // two copies take turns
    EXPECT_EQ(hf_.version_count(), 2u);
  }
}

TEST_F(HfTargetTest, ADamagedCopyIsNotPatched) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const fs::path previous = hf_.weight_file();
  ASSERT_TRUE(ok(hf_.delta()));
  flip_byte(previous, read_file(previous).size() - 1);
  ASSERT_TRUE(ok(hf_.delta(0.5)));
  EXPECT_EQ(hf_.differs(), "");
  ASSERT_TRUE(ok(hf_.delta(0.5)));
  EXPECT_EQ(hf_.differs(), "");
  EXPECT_FALSE(hf_.has_incoming());
}

TEST_F(HfTargetTest, DamageThatNoDeltaTouchesIsNotCarriedOn) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const fs::path previous = hf_.weight_file();
  ASSERT_TRUE(ok(hf_.delta(1e-3)));
  flip_byte(previous, read_file(previous).size() / 2);  // of a tile that both deltas change, but not there
  ASSERT_TRUE(ok(hf_.delta(1e-3)));
  EXPECT_NE(hf_.weight_file(), previous);
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, DamageOfTheCommittedVersionFailsTheNextCommit) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const std::size_t bytes = read_file(hf_.weight_file()).size();
  for (std::size_t at = bytes / 2; at < bytes; at += 4096) flip_byte(hf_.weight_file(), at);
  const Status status = hf_.delta(1e-3);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::corrupt) << status.error().to_string();
  EXPECT_NE(status.error().message().find("somebody wrote to it"), std::string::npos) << status.error().to_string();
  EXPECT_FALSE(hf_.has_incoming());
}

TEST_F(HfTargetTest, AHardLinkKeepsItsBytes) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const fs::path backup = dir_.path() / "backup.safetensors";
  fs::create_hard_link(hf_.weight_file(), backup);
  const auto bytes = read_file(backup);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_EQ(hf_.differs(), "");
  EXPECT_EQ(read_file(backup), bytes);
}

TEST_F(HfTargetTest, AnUpdateThatIsGivenUpLeavesNoFiles) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  ASSERT_TRUE(ok(hf_.target().begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_TRUE(hf_.has_incoming());
  hf_.target().discard_full();
  EXPECT_FALSE(hf_.has_incoming());
  ASSERT_TRUE(ok(hf_.target().begin_full(FullUpdatePolicy::stage, in_time())));
  hf_.close();
  EXPECT_FALSE(hf_.has_incoming());
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, ResumesAfterARestart) {
  ASSERT_TRUE(ok(hf_.restart()));
  EXPECT_EQ(hf_.target().committed(), nullptr);
  ASSERT_TRUE(ok(hf_.full()));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ok(hf_.delta()));
    ASSERT_TRUE(ok(hf_.restart()));
    const TargetState* state = hf_.target().committed();
    ASSERT_NE(state, nullptr);
    EXPECT_EQ(state->version, hf_.held().state.version);
    EXPECT_EQ(state->digests, hf_.held().state.digests);
    EXPECT_EQ(state->root, hf_.held().state.root);
    EXPECT_EQ(read_live(hf_.target()), hf_.held().half);
    EXPECT_TRUE(fails(roll_back(hf_.target()), Errc::unsupported));
  }
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_EQ(hf_.differs(), "");
  EXPECT_LE(hf_.version_count(), 2u);
}

TEST_F(HfTargetTest, ResumesTheRolledBackVersion) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const Reference first = hf_.held();
  ASSERT_TRUE(ok(hf_.delta()));
  ASSERT_TRUE(ok(roll_back(hf_.target())));
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_NE(hf_.target().committed(), nullptr);
  EXPECT_EQ(hf_.target().committed()->version, first.state.version);
  EXPECT_EQ(hf_.differs(first), "");
}

/// Whatever is wrong with the current version, it is not taken, and the version before is.
TEST_F(HfTargetTest, FallsBackToTheLastWholeVersion) {
  using Damage = std::function<void()>;
  const auto current = [&] { return fs::canonical(hf_.out() / "current"); };
  const auto record = [&] { return fs::path(current().string() + ".json"); };
  const std::vector<std::pair<std::string, Damage>> damages = {
      {"last byte of a weight file", [&] { flip_byte(hf_.weight_file(), read_file(hf_.weight_file()).size() - 1); }},
      {"header byte", [&] { flip_byte(hf_.weight_file(1), 12); }},
      {"weight file cut short", [&] { fs::resize_file(hf_.weight_file(), 100); }},
      {"weight file longer", [&] { fs::resize_file(hf_.weight_file(), fs::file_size(hf_.weight_file()) + 1); }},
      {"weight file missing", [&] { fs::remove(hf_.weight_file(1)); }},
      {"weight file is a link",
       [&] {
         const fs::path file = hf_.weight_file();
         fs::rename(file, dir_.path() / "elsewhere");
         fs::create_symlink(dir_.path() / "elsewhere", file);
       }},
      {"other file", [&] { flip_byte(current() / "config.json", 3); }},
      {"other file missing", [&] { fs::remove(current() / "empty.txt"); }},
      {"no record", [&] { fs::remove(record()); }},
      {"record is no JSON", [&] { fs::resize_file(record(), 10); }},
      {"record is empty", [&] { fs::resize_file(record(), 0); }},
      {"root in the record",
       [&] {
         std::vector<std::byte> text = read_file(record());
         const auto kRoot = bytes_of(std::string_view("\"root\": \""));
         const std::size_t at = std::search(text.begin(), text.end(), kRoot.begin(), kRoot.end()) - text.begin() + 10;
         text[at] = text[at] == std::byte{'0'} ? std::byte{'1'} : std::byte{'0'};
         write_file(record(), text);
       }},
      {"directory missing", [&] { fs::remove_all(current()); }},
  };
  for (const auto& damage : damages) {
    SCOPED_TRACE(damage.first);
    fs::remove_all(hf_.out());
    ASSERT_TRUE(ok(hf_.restart()));
    ASSERT_TRUE(ok(hf_.full()));
    const Reference before = hf_.held();
    ASSERT_TRUE(ok(hf_.delta()));
    hf_.close();
    damage.second();
    ASSERT_TRUE(ok(hf_.restart()));
    ASSERT_NE(hf_.target().committed(), nullptr);
    EXPECT_EQ(hf_.target().committed()->version, before.state.version);
    EXPECT_EQ(hf_.differs(before), "");
    hf_.holds(before);
    ASSERT_TRUE(ok(hf_.delta()));
    EXPECT_EQ(hf_.differs(), "");
  }
}

TEST_F(HfTargetTest, NothingWholeMeansNothingCommitted) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  flip_byte(hf_.weight_file(), 5000);
  ASSERT_TRUE(ok(hf_.restart()));
  EXPECT_EQ(hf_.target().committed(), nullptr);
  EXPECT_FALSE(fs::is_symlink(hf_.out() / "current")) << "engines would load a broken version";
  ASSERT_TRUE(ok(hf_.full()));
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, AnotherLayoutIsServedUntilTheNextCommit) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  HfCase other(hf_.out(), 2, two_tensors());
  ASSERT_TRUE(ok(other.restart()));
  EXPECT_EQ(other.target().committed(), nullptr);
  EXPECT_EQ(hf_.differs(), "");
  other.trainer().step(0.5);
  ASSERT_TRUE(ok(other.full()));
  EXPECT_EQ(other.differs(), "");
  ASSERT_TRUE(ok(roll_back(other.target())));
  EXPECT_EQ(other.target().committed(), nullptr);
  EXPECT_EQ(hf_.differs(), "") << "engines have loaded it";
  EXPECT_EQ(other.version_count(), 1u);
  ASSERT_TRUE(ok(other.full()));
  EXPECT_EQ(other.version_count(), 2u);
  ASSERT_TRUE(ok(other.delta()));
  const Reference before = other.held();
  EXPECT_EQ(other.version_count(), 2u);
  ASSERT_TRUE(ok(other.delta()));
  ASSERT_TRUE(ok(roll_back(other.target())));
  EXPECT_EQ(other.differs(before), "");
}

TEST_F(HfTargetTest, AnotherSidecarIsServedUntilTheNextCommit) {
  using Change = std::function<void(Sidecar&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"contents", [](Sidecar& s) { s.others[0].bytes.push_back(std::byte{'\n'}); }},
      {"one file more",
       [](Sidecar& s) {
         s.others.push_back({"chat_template.jinja", {std::byte{'x'}}});
       }},
      {"one file less", [](Sidecar& s) { s.others.pop_back(); }},
      {"file split", [](Sidecar& s) { s.weights[0].name = "renamed.safetensors"; }},
  };
  for (const auto& change : changes) {
    SCOPED_TRACE(change.first);
    fs::remove_all(hf_.out());
    hf_.sidecar() = awkward_sidecar(*hf_.trainer().layout());
    const Sidecar before = hf_.sidecar();
    ASSERT_TRUE(ok(hf_.restart()));
    ASSERT_TRUE(ok(hf_.full()));
    ASSERT_TRUE(ok(hf_.delta()));
    const fs::path served = fs::canonical(hf_.out() / "current");
    change.second(hf_.sidecar());
    ASSERT_TRUE(ok(hf_.restart()));
    EXPECT_EQ(hf_.target().committed(), nullptr) << "a delta would keep the old side files";
    EXPECT_EQ(fs::canonical(hf_.out() / "current"), served);
    EXPECT_EQ(compare_directory(served, *hf_.trainer().layout(), before, hf_.held().half), "");
    ASSERT_TRUE(ok(hf_.full()));
    EXPECT_EQ(hf_.differs(), "");
    EXPECT_EQ(hf_.version_count(), 2u) << "a rollback leads to it";
  }
}

TEST_F(HfTargetTest, NothingOlderTakesThePlaceOfAnotherLayout) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const int reader = ::open(hf_.weight_file().c_str(), O_RDONLY);  // keeps the version when the next one comes
  ASSERT_GE(reader, 0);
  hf_.close();
  HfCase other(hf_.out(), 2, two_tensors());
  ASSERT_TRUE(ok(other.restart()));
  ASSERT_TRUE(ok(other.full()));
  ASSERT_TRUE(ok(other.delta()));
  other.close();
  ASSERT_EQ(hf_.version_count(), 3u);
  ASSERT_TRUE(ok(hf_.restart()));
  ::close(reader);
  EXPECT_EQ(other.differs(), "") << "an older version was published without a commit";
  EXPECT_EQ(hf_.target().committed(), nullptr);
  ASSERT_TRUE(ok(hf_.full()));
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, ADeadlineThatPassesLeavesEverything) {
  const Deadline passed = Deadline::after(std::chrono::seconds(0));
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  {
    auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
    ASSERT_TRUE(target.ok());
    ThreadPool pool(2, "test");
    EXPECT_TRUE(fails((*target)->open(pool, passed), Errc::timed_out, "verifying"));
    EXPECT_EQ((*target)->committed(), nullptr);
  }
  EXPECT_EQ(hf_.differs(), "");
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_NE(hf_.target().committed(), nullptr);
}

TEST_F(HfTargetTest, AStopInTheVerificationLeavesEverything) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  const fs::path link = fs::read_symlink(hf_.out() / "current");
  const fs::path record = hf_.out() / (link.string() + ".json");
  const auto record_before = read_file(record);
  const auto entries_before = hf_.entries();
  {
    auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
    ASSERT_TRUE(target.ok());
    ThreadPool pool(2, "test");
    std::stop_source stop;
    stop.request_stop();  // nothing before the verification listens to it here
    EXPECT_TRUE(fails((*target)->open(pool, {in_time(), stop.get_token()}), Errc::cancelled, "verifying"));
    EXPECT_EQ((*target)->committed(), nullptr);
  }
  EXPECT_EQ(fs::read_symlink(hf_.out() / "current"), link);
  EXPECT_EQ(read_file(record), record_before);
  EXPECT_EQ(hf_.entries(), entries_before);
  EXPECT_EQ(hf_.differs(), "");
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_NE(hf_.target().committed(), nullptr);
}

TEST_F(HfTargetTest, TheLinkToABrokenVersionStaysUntilAllHaveBeenLookedAt) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const Reference first = hf_.held();
  ASSERT_TRUE(ok(hf_.delta()));
  hf_.close();
  fs::resize_file(hf_.weight_file(), 10);
  const fs::path link = fs::read_symlink(hf_.out() / "current");
  const auto entries_before = hf_.entries();
  {
    auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
    ASSERT_TRUE(target.ok());
    ThreadPool pool(2, "test");
    std::stop_source stop;
    stop.request_stop();
    const Deadline passed = Deadline::after(std::chrono::seconds(0));
    EXPECT_TRUE(fails((*target)->open(pool, passed), Errc::timed_out, "verifying"));
    EXPECT_EQ(fs::read_symlink(hf_.out() / "current"), link);
    EXPECT_TRUE(fails((*target)->open(pool, {in_time(), stop.get_token()}), Errc::cancelled, "verifying"));
    EXPECT_EQ(fs::read_symlink(hf_.out() / "current"), link);
  }
  EXPECT_EQ(hf_.entries(), entries_before);
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_NE(hf_.target().committed(), nullptr);
  EXPECT_EQ(hf_.differs(first), "");
}

TEST_F(HfTargetTest, AFullUpdateThatIsStoppedAsItBeginsLeavesNothing) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const auto before = hf_.entries();
  std::stop_source stop;
  stop.request_stop();
  for (const FullUpdatePolicy policy : {FullUpdatePolicy::stage, FullUpdatePolicy::in_place}) {
    EXPECT_TRUE(fails(hf_.target().begin_full(policy, Deadline::after(std::chrono::seconds(0))), Errc::timed_out, ""));
    EXPECT_TRUE(fails(hf_.target().begin_full(policy, {in_time(), stop.get_token()}), Errc::cancelled, ""));
    EXPECT_EQ(hf_.entries(), before);
    EXPECT_NE(hf_.target().committed(), nullptr);
  }
  TempDir dir;
  const auto file = create_reserved(dir.path() / "x", 1000, {in_time(), stop.get_token()});
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.error().code(), Errc::cancelled);
  EXPECT_FALSE(fs::exists(dir.path() / "x"));
}

TEST_F(HfTargetTest, RemovingLeftoversEndsToo) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  const fs::path leftover = hf_.out() / "versions" / ".incoming-99999-0";
  fs::create_directories(leftover);
  write_file(leftover / "x", std::vector<std::byte>(10));
  {
    auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
    ASSERT_TRUE(target.ok());
    ThreadPool pool(2, "test");
    std::stop_source stop;
    stop.request_stop();
    EXPECT_TRUE(fails((*target)->open(pool, Deadline::after(std::chrono::seconds(0))), Errc::timed_out, "removing"));
    EXPECT_TRUE(fails((*target)->open(pool, {in_time(), stop.get_token()}), Errc::cancelled, "removing"));
    EXPECT_TRUE(fs::exists(leftover / "x"));
  }
  ASSERT_TRUE(ok(hf_.restart()));
  EXPECT_FALSE(fs::exists(leftover));
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, OfALeftoverThatIsALinkTheLinkIsRemoved) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  const fs::path elsewhere = dir_.path() / "elsewhere";
  fs::create_directories(elsewhere / "part");
  write_file(elsewhere / "part" / "x", std::vector<std::byte>(10));
  const fs::path versions = hf_.out() / "versions";
  fs::create_directory_symlink(elsewhere, versions / ".incoming-x");
  fs::create_directory_symlink(elsewhere, versions / "00000000000000ff-3");  // a version without its record
  fs::create_directories(versions / ".incoming-y");
  fs::create_directory_symlink(elsewhere, versions / ".incoming-y" / "link");
  ASSERT_TRUE(ok(hf_.restart()));
  EXPECT_TRUE(fs::exists(elsewhere / "part" / "x")) << "a file outside the target's directory was removed";
  const std::vector<std::string> expected = {"1a2b3c4d5e6f7788-1", "1a2b3c4d5e6f7788-1.json"};
  EXPECT_EQ(hf_.entries(), expected);
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, WhatAVersionsLinkLeadsToIsNobodysBusiness) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  const fs::path elsewhere = dir_.path() / "elsewhere";
  fs::create_directories(elsewhere);
  write_file(elsewhere / "x", std::vector<std::byte>(10));
  const std::ifstream in_use(elsewhere / "x");
  const fs::path link = hf_.out() / "versions" / "00000000000000ff-3";
  fs::create_directory_symlink(elsewhere, link);
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_FALSE(fs::exists(fs::symlink_status(link))) << "who reads there does not read the version";
  EXPECT_TRUE(fs::exists(elsewhere / "x"));
}

TEST_F(HfTargetTest, LeftoversAreRemovedAndNothingElse) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  hf_.close();
  const fs::path versions = hf_.out() / "versions";
  fs::create_directories(versions / ".incoming-99999-0" / "part two");
  write_file(versions / ".incoming-99999-0" / "part two" / "x", std::vector<std::byte>(10));
  fs::create_directories(versions / "00000000000000ff-3");  // renamed, but its record was never written
  write_file(versions / "00000000000000ff-4.json", std::vector<std::byte>(3));
  write_file(versions / "00000000000000ff-5.json.new", std::vector<std::byte>(3));
  fs::create_directories(versions / "my backup");
  fs::create_directories(versions / "00000000000000ff-backup");
  write_file(versions / "notes.json", std::vector<std::byte>(3));
  write_file(versions / "notes.new", std::vector<std::byte>(3));
  write_file(versions / "notes.json.new", std::vector<std::byte>(3));
  fs::create_symlink("versions/nowhere", hf_.out() / ".current.new");
  ASSERT_TRUE(ok(hf_.restart()));
  const std::vector<std::string> expected = {
      "00000000000000ff-backup", "1a2b3c4d5e6f7788-1", "1a2b3c4d5e6f7788-1.json", "my backup", "notes.json",
      "notes.json.new",          "notes.new"};
  EXPECT_EQ(hf_.entries(), expected);
  ASSERT_TRUE(ok(hf_.delta()));
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_TRUE(fs::exists(versions / "my backup"));
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfTargetTest, OneTargetADirectory) {
  ASSERT_TRUE(ok(hf_.restart()));
  const auto second = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  const pid_t parent = getpid();
  Child child([&](int) -> std::string {
    const auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
    return target.ok() ? "made" : target.error().to_string();
  });
  // A forked child has our table of held directories; a process of its own is told by the lock.
  EXPECT_NE(child.finish().find("already_exists"), std::string::npos);
  hf_.close();
  Child holder([&](int stop) -> std::string {
    const auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out());
    std::ofstream(dir_.path() / "ready");
    while (!wants_stop(stop, 1000)) {
    }
    return target.ok() ? "made" : target.error().to_string();
  });
  while (!fs::exists(dir_.path() / "ready")) usleep(1000);
  EXPECT_TRUE(fails(hf_.restart(), Errc::already_exists, "pid " + std::to_string(holder.pid())));
  EXPECT_EQ(getpid(), parent);
  holder.kill_and_wait();
  EXPECT_TRUE(ok(hf_.restart())) << "a dead receiver keeps nothing locked";
}

TEST_F(HfTargetTest, AForkedChildDoesNotKeepTheDirectory) {
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  Child child([](int stop) -> std::string {
    while (!wants_stop(stop, 1000)) {
    }
    return "";
  });
  mark(hf_.weight_file());
  ASSERT_TRUE(ok(hf_.delta()));
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_TRUE(is_marked(hf_.weight_file())) << "the child's memory counts as a reader";
  EXPECT_TRUE(ok(hf_.restart()));
  EXPECT_EQ(child.finish(), "");
}

TEST_F(HfTargetTest, ACurrentThatIsNoLinkIsInTheWay) {
  fs::create_directories(hf_.out() / "current");
  EXPECT_TRUE(fails(hf_.restart(), Errc::already_exists, "current"));
}

TEST_F(HfTargetTest, AModelOfSomebodyElseIsInTheWay) {
  hf_.close();
  for (const char* file : {"model-00001-of-00002.safetensors", "config.json", "pytorch_model.bin"}) {
    const fs::path out = dir_.path() / "other" / file;
    fs::create_directories(out);
    std::ofstream(out / "notes.txt") << "harmless";
    const auto make = [&](HfTargetOptions options = {}) {
      const auto made = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), out, options);
      return made.ok() ? Status() : Status(made.error());
    };
    std::ofstream(out / file) << "a model";
    EXPECT_TRUE(fails(make(), Errc::already_exists, file));
    EXPECT_FALSE(fs::exists(out / "versions")) << "nothing was written";
    EXPECT_TRUE(ok(make({.beside_model = true})));
    EXPECT_TRUE(ok(make())) << "it is a receiver's own from then on";
    fs::remove_all(out);
    fs::create_directories(out);
    std::ofstream(out / "notes.txt") << "harmless";
    EXPECT_TRUE(ok(make()));
  }
}

TEST_F(HfTargetTest, HostileSidecarsAreRefused) {
  for (const char* name : {"/etc/passwd", "../x", "a/../../x", "..", "", ".", "a/./b"}) {
    SCOPED_TRACE(name);
    Sidecar sidecar = hf_.sidecar();
    sidecar.others[0].name = name;
    const auto other = make_hf_target(hf_.trainer().layout(), sidecar, hf_.out());
    ASSERT_FALSE(other.ok());
    EXPECT_EQ(other.error().code(), Errc::invalid_argument);
    sidecar = hf_.sidecar();
    sidecar.weights[0].name = name;
    const auto weight = make_hf_target(hf_.trainer().layout(), sidecar, hf_.out());
    ASSERT_FALSE(weight.ok());
    EXPECT_EQ(weight.error().code(), Errc::invalid_argument);
  }
  Sidecar sidecar = hf_.sidecar();
  sidecar.weights[0].tensors.pop_back();
  EXPECT_FALSE(make_hf_target(hf_.trainer().layout(), sidecar, hf_.out()).ok());
}

TEST_F(HfTargetTest, LargeDeltasAreNotKept) {
  // 20 MiB of raw tiles are more than is kept, so the version before cannot be patched forward.
  HfCase big(dir_.path() / "big", 3, {{"w", Dtype::f32, {5120, 1024}, {}, {}}});
  ASSERT_TRUE(ok(big.restart()));
  ASSERT_TRUE(ok(big.full()));
  const auto second_patches = [&](double first_density) {
    EXPECT_TRUE(ok(big.delta(0.001)));
    mark(big.weight_file(1));
    EXPECT_TRUE(ok(big.delta(first_density, delta::ValueForm::absolute)));
    EXPECT_TRUE(ok(big.delta(0.001)));
    EXPECT_EQ(big.differs(), "");
    return is_marked(big.weight_file(1));
  };
  EXPECT_TRUE(second_patches(0.001));
  EXPECT_FALSE(second_patches(1.0));
}

TEST_F(HfTargetTest, TheSafetensorsPackageReadsThem) {
  if (std::system("python3 -c 'import safetensors' 2>/dev/null") != 0) {
    GTEST_SKIP() << "python3 has no package safetensors";
  }
  ASSERT_TRUE(ok(hf_.restart()));
  ASSERT_TRUE(ok(hf_.full()));
  ASSERT_TRUE(ok(hf_.delta()));
  ASSERT_TRUE(ok(hf_.delta()));
  const fs::path expected = dir_.path() / "half";
  write_file(expected, hf_.held().half);
  std::ofstream list(dir_.path() / "tensors");
  for (const Sidecar::File& file : hf_.sidecar().weights) {
    for (const std::uint32_t index : file.tensors) {
      const Tensor& tensor = hf_.trainer().layout()->tensors()[index];
      list << file.name << '\t' << tensor.spec.name << '\t' << tensor.offset << '\t' << tensor.bytes << '\n';
    }
  }
  list.close();
  std::ofstream script(dir_.path() / "check.py");
  script << R"(import os, sys
from safetensors import deserialize
model, half, tensors = sys.argv[1], open(sys.argv[2], "rb").read(), open(sys.argv[3])
files, seen = {}, 0
for line in tensors:
    name, tensor, offset, size = line.rstrip("\n").split("\t")
    if name not in files:
        files[name] = dict(deserialize(open(os.path.join(model, name), "rb").read()))
    assert bytes(files[name][tensor]["data"]) == half[int(offset):int(offset) + int(size)], tensor
    seen += 1
assert seen == sum(len(f) for f in files.values()) and seen > 0
)";
  script.close();
  const std::string command = "python3 '" + (dir_.path() / "check.py").string() + "' '" +
                              (hf_.out() / "current").string() + "' '" + expected.string() + "' '" +
                              (dir_.path() / "tensors").string() + "'";
  EXPECT_EQ(std::system(command.c_str()), 0);
}

TEST(HfRecord, RoundTrip) {
  HfRecord record{{{0x00000000000000abull, ~0ull}, "l\"a\\bel \xC3\xA9"}, {}, {}, {}};
  for (std::size_t i = 0; i < 16; ++i) record.root.bytes[i] = static_cast<std::uint8_t>(17 * i);
  record.files.bytes[3] = 0x5a;
  const auto back = decode_record(encode_record(record));
  ASSERT_TRUE(back.ok()) << back.error().to_string();
  EXPECT_EQ(back->version, record.version);
  EXPECT_EQ(back->layout, record.layout);
  EXPECT_EQ(back->root, record.root);
  EXPECT_EQ(back->files, record.files);
  record.version.label = "\xFF bad";  // no UTF-8: kept in some form, never an exception
  EXPECT_TRUE(decode_record(encode_record(record)).ok());
}

TEST(HfRecord, EveryFieldIsChecked) {
  const std::string good = encode_record({{{1, 2}, "x"}, {}, {}, {}});
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return decode_record(text);
  };
  EXPECT_EQ(replaced("\"format\": 1", "\"format\": 2").error().code(), Errc::unsupported);
  EXPECT_EQ(replaced("\"format\": 1", "\"format\": \"1\"").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("0000000000000001", "0000000000000000").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("0000000000000001", "000000000000001").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("0000000000000001", "000000000000000G").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("\"number\": 2", "\"number\": -2").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("\"layout\"", "\"loyaut\"").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("\"root\"", "\"roof\"").error().code(), Errc::corrupt);
  EXPECT_EQ(replaced("\"files\"", "\"fires\"").error().code(), Errc::corrupt);
  EXPECT_FALSE(decode_record("").ok());
  EXPECT_FALSE(decode_record("[]").ok());
  for (std::size_t n = 0; n + 2 < good.size(); ++n) EXPECT_FALSE(decode_record(good.substr(0, n)).ok()) << n;
}

}  // namespace
}  // namespace deltasync::test
