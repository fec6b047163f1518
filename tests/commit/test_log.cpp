// The coordinator's log: what it holds after every kind of damage, and what a rewritten one still says.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <iterator>

#include "commit/coordinator_machine.hpp"
#include "commit/log_file.hpp"
#include "format/commit_log.hpp"
#include "tests/commit/pretend_target.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::commit {
namespace {

using testing::HasSubstr;

std::vector<Record> history() {
  return {{RecordKind::start, 9, 1, 2, {}, {}},
          {RecordKind::commit, 9, 1, 2, {1, 1}, version(1)},
          {RecordKind::finish, 9, 1, 2, {1, 1}, version(1)},
          {RecordKind::abort, 9, 1, 2, {1, 2}, {}},
          {RecordKind::start, 9, 2, 2, {}, version(1)},
          {RecordKind::commit, 9, 2, 2, {2, 1}, {{1, 2}, std::string(kLabelBytesMax, 'x')}},
          {RecordKind::roll_back, 9, 2, 2, {2, 1}, {}}};
}

std::vector<std::byte> bytes_of_log(const std::vector<Record>& records) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const LogRecord r = encode_record(records[i], i);
    bytes.insert(bytes.end(), bytes_of(r).begin(), bytes_of(r).end());
  }
  return bytes;
}

TEST(CommitLog, RecordsComeBack) {
  const auto found = decode_log(bytes_of_log(history()));
  ASSERT_TRUE(found) << found.error().to_string();
  EXPECT_EQ(found->records, history());
  EXPECT_EQ(found->torn_bytes, 0u);
}

TEST(CommitLog, EveryTornEndIsCutOff) {
  const auto whole = bytes_of_log(history());
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const auto found = decode_log(ByteSpan(whole).first(bytes));
    ASSERT_TRUE(found) << bytes;
    EXPECT_EQ(found->records.size(), bytes / kLogRecordBytes);
    EXPECT_EQ(found->torn_bytes, bytes % kLogRecordBytes);
  }
}

TEST(CommitLog, EveryFlippedBitIsFound) {
  const auto whole = bytes_of_log(history());
  const std::size_t last = whole.size() - kLogRecordBytes;
  for (std::size_t bit = 0; bit < whole.size() * 8; bit += bit < last * 8 ? 13 : 1) {
    auto bytes = whole;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto found = decode_log(bytes);
    if (bit / 8 >= last) {  // as if it had been torn
      ASSERT_TRUE(found) << bit;
      EXPECT_EQ(found->records.size(), history().size() - 1);
      EXPECT_EQ(found->torn_bytes, kLogRecordBytes);
    } else {
      ASSERT_FALSE(found) << bit;
      EXPECT_EQ(found.error().code(), Errc::corrupt);
    }
  }
}

TEST(CommitLog, OnlyTheLastRecordCanBeTorn) {
  const auto whole = bytes_of_log(history());
  for (const std::size_t behind : {std::size_t{1}, kLogRecordBytes - 1, kLogRecordBytes, 2 * kLogRecordBytes}) {
    auto bytes = whole;
    const std::size_t from = bytes.size() - 3 * kLogRecordBytes;
    for (std::size_t at = from; at < bytes.size(); at += kLogRecordBytes) bytes[at + 100] ^= std::byte{1};
    bytes.resize(from + kLogRecordBytes);
    ASSERT_TRUE(decode_log(bytes));
    bytes = whole;
    for (std::size_t at = from; at < bytes.size(); at += kLogRecordBytes) bytes[at + 100] ^= std::byte{1};
    bytes.resize(from + kLogRecordBytes + behind);
    const auto found = decode_log(bytes);
    ASSERT_FALSE(found) << behind;
    EXPECT_EQ(found.error().code(), Errc::corrupt);
    EXPECT_THAT(found.error().message(), HasSubstr("record 4 is damaged, and " + std::to_string(behind) + " bytes"));
  }
}

TEST(CommitLog, RecordsOutOfPlaceAndOfUnknownKindsAreRefused) {
  auto bytes = bytes_of_log(history());
  const auto cut = ByteSpan(bytes).subspan(kLogRecordBytes);  // the first one is missing
  ASSERT_FALSE(decode_log(cut));
  EXPECT_THAT(decode_log(cut).error().message(), HasSubstr("record 0 says that it is 1"));
  Record later = history()[1];
  later.kind = static_cast<RecordKind>(6);
  const LogRecord r = encode_record(later, 0);
  EXPECT_EQ(decode_log(bytes_of(r)).error().code(), Errc::unsupported);
}

/// A history as a coordinator writes it: starts, transactions that finish or do not.
std::vector<Record> random_history(std::uint64_t seed) {
  test::Random random(seed);
  std::vector<Record> log;
  std::uint64_t term = 0;
  std::uint64_t number = 0;
  Version group;
  const auto start = [&] { log.push_back({RecordKind::start, 9, ++term, 2, {}, group}); };
  start();
  const std::uint64_t steps = random.below(12);
  for (std::uint64_t i = 0; i < steps; ++i) {
    const TransactionId id{term, ++number};
    if (random.below(4) == 0) {
      log.push_back({RecordKind::abort, 9, term, 2, id, {}});
      continue;
    }
    const Version v = version(100 * seed + i);
    log.push_back({RecordKind::commit, 9, term, 2, id, v});
    if (random.below(4) == 0) start();  // open over a restart
    if (i + 1 == steps && random.below(2) == 0) break;
    const bool finish = random.below(2) == 0;
    log.push_back({finish ? RecordKind::finish : RecordKind::roll_back, 9, term, 2, id, finish ? v : Version()});
    if (finish) group = v;
    if (random.below(3) == 0) start();
  }
  return log;
}

TEST(CommitLog, ARewrittenLogSaysTheSame) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const auto log = random_history(seed);
    const auto before = CoordinatorMachine::recover(2, log, 1);
    const auto after = CoordinatorMachine::recover(2, needed_records(log), 1);
    ASSERT_TRUE(before) << seed << ": " << before.error().to_string();
    ASSERT_TRUE(after) << seed << ": " << after.error().to_string();
    const CoordinatorState& a = before->state();
    const CoordinatorState& b = after->state();
    EXPECT_EQ(a.log, b.log) << seed;
    EXPECT_EQ(a.term, b.term) << seed;
    EXPECT_EQ(a.group, b.group) << seed;
    EXPECT_EQ(a.last, b.last) << seed;
    EXPECT_EQ(a.outcome, b.outcome) << seed;
    EXPECT_EQ(a.stage, b.stage) << seed;
    EXPECT_EQ(a.transaction, b.transaction) << seed;
    EXPECT_EQ(a.version, b.version) << seed;
    EXPECT_LE(needed_records(log).size(), 4u);
  }
}

class CommitLogFile : public ::testing::Test {
 protected:
  std::filesystem::path path() const { return dir_.path() / "commit.log"; }
  std::unique_ptr<LogFile> open() {
    auto log = LogFile::open(path());
    EXPECT_TRUE(log) << log.error().to_string();
    return log ? *std::move(log) : nullptr;
  }
  test::TempDir dir_;
};

TEST_F(CommitLogFile, AppendedRecordsAreThereAgain) {
  auto log = open();
  for (const Record& r : history()) ASSERT_TRUE(log->append(r));
  log.reset();
  log = open();
  EXPECT_EQ(log->records(), needed_records(history()));
}

TEST_F(CommitLogFile, ATornRecordIsGoneForGood) {
  auto log = open();
  ASSERT_TRUE(log->append(history()[0]));
  ASSERT_TRUE(log->append(history()[1]));
  log.reset();
  std::filesystem::resize_file(path(), 2 * kLogRecordBytes - 1);
  log = open();
  EXPECT_EQ(log->records().size(), 1u);
  EXPECT_EQ(log->torn_bytes(), kLogRecordBytes - 1);
  log.reset();
  log = open();
  EXPECT_EQ(log->torn_bytes(), 0u);
  EXPECT_EQ(log->records().size(), 1u);
}

TEST_F(CommitLogFile, DamageIsRefusedAndNamesTheFile) {
  auto log = open();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(log->append(history()[static_cast<std::size_t>(i)]));
  log.reset();
  {
    std::fstream file(path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(100);
    file.put('!');
  }
  const auto refused = LogFile::open(path());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::corrupt);
  EXPECT_THAT(refused.error().message(), HasSubstr("commit.log"));
  EXPECT_EQ(std::filesystem::file_size(path()), 3 * kLogRecordBytes) << "what is refused is left as it is";
}

TEST_F(CommitLogFile, HasOneOwner) {
  auto log = open();
  EXPECT_EQ(LogFile::open(path()).error().code(), Errc::already_exists);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto second = LogFile::open(path());
    ::_exit(!second && second.error().code() == Errc::already_exists ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  log.reset();
  EXPECT_NE(open(), nullptr);
}

/// Records that go to a file which nobody will ever read again are none.
TEST_F(CommitLogFile, IsOneFileByWhateverName) {
  const std::filesystem::path link = dir_.path() / "link.log";
  std::filesystem::create_symlink(path(), link);
  EXPECT_EQ(LogFile::open(link).error().code(), Errc::not_found) << "a link to nothing";
  { ASSERT_TRUE(LogFile::open(path())); }
  auto log = LogFile::open(link);
  ASSERT_TRUE(log) << log.error().to_string();
  EXPECT_TRUE(std::filesystem::is_symlink(link)) << "a file in the link's place is not the one that others find";
  EXPECT_EQ(LogFile::open(path()).error().code(), Errc::already_exists);
  EXPECT_TRUE((*log)->still_ours());
}

TEST_F(CommitLogFile, TakesNothingOnceItsNameIsAnothers) {
  const auto lock = path().string() + ".lock";
  const auto away = dir_.path() / "away";
  const std::function<void()> takes[] = {
      [&] { std::filesystem::remove(path()); },
      [&] { std::filesystem::rename(path(), away); },
      [&] { std::filesystem::copy_file(path(), away), std::filesystem::rename(away, path()); },
      [&] { std::filesystem::remove(lock); },
      [&] { std::filesystem::copy_file(lock, away), std::filesystem::rename(away, lock); },
  };
  for (const auto& take : takes) {
    auto log = open();
    ASSERT_TRUE(log->append(history()[0]));
    const auto before = std::filesystem::file_size(path());
    take();
    EXPECT_FALSE(log->still_ours());
    const auto refused = log->append(history()[1]);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), Errc::io);
    EXPECT_THAT(refused.error().message(), testing::AllOf(HasSubstr("commit.log"), HasSubstr("while it was in use")));
    EXPECT_FALSE(log->append(history()[1])) << "nor later";
    if (std::filesystem::exists(path())) {
      EXPECT_EQ(std::filesystem::file_size(path()), before);
    }
    log.reset();
    for (const auto& file : {path(), std::filesystem::path(lock), away}) std::filesystem::remove(file);
  }
}

TEST(CommitLogSize, StaysSmall) {
  const test::TempDir memory("/dev/shm");  // so many flushes take minutes on a busy disk
  const auto path = memory.path() / "commit.log";
  auto log = *LogFile::open(path);
  ASSERT_TRUE(log->append(history()[0]));
  for (std::uint64_t i = 1; i < 5000; ++i) ASSERT_TRUE(log->append({RecordKind::abort, 9, 1, 2, {1, i}, {}}));
  EXPECT_LT(std::filesystem::file_size(path), 5000 * kLogRecordBytes);
}

TEST_F(CommitLogFile, ADirectoryThatIsNotThereIsNamed) {
  const auto refused = LogFile::open(dir_.path() / "none" / "commit.log");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::not_found);
}

}  // namespace
}  // namespace deltasync::commit
