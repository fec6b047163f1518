// A coordinator and three ranks as processes over loopback, killed and stopped at every step. What any two ranks have
// served at the same time is the same version; and once everybody is back all serve the newest.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "tests/commit/child_process.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::test {
namespace {

constexpr auto kLimit = std::chrono::seconds(60);  ///< no wait of a test that passes comes near it
constexpr unsigned kRanks = 3;
constexpr const char* kKinds[kRanks] = {"memory", "memory", "directory"};

template <class F>
bool eventually(const F& done) {
  const Deadline deadline = Deadline::after(kLimit);
  while (!done()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

/// What the ranks have said of themselves, replayed line by line.
class Ledger {
 public:
  struct Rank {
    std::string serves;  ///< number; empty: does not
    std::string memory;
    unsigned doubts = 0;
  };

  explicit Ledger(std::filesystem::path file) : file_(std::move(file)) {}
  /// False as soon as the ranks ever disagreed, or served wrong bytes.
  bool read() {
    std::ifstream in(file_);
    in.seekg(static_cast<std::streamoff>(at_));
    for (std::string line; std::getline(in, line) && !in.eof();) {
      at_ += line.size() + 1;
      take(line);
    }
    return wrong.empty();
  }

  Rank ranks[kRanks];
  std::string wrong;

 private:
  void take(const std::string& line) {
    std::istringstream words(line);
    unsigned rank = 0;
    std::string what;
    words >> rank >> what;
    Rank& r = ranks[rank];
    if (what == "in_doubt") {
      ++r.doubts;  // says nothing of now: another thread looks at the state and writes it down
      return;
    }
    r.serves.clear();
    r.memory.clear();
    if (what != "serve") return;
    words >> r.serves >> r.memory;
    for (unsigned other = 0; other < kRanks; ++other) {
      if (ranks[other].serves.empty() || ranks[other].serves == r.serves) continue;
      wrong += line + ", while rank " + std::to_string(other) + " serves " + ranks[other].serves + "\n";
    }
    if (r.memory != r.serves) wrong += "other bytes: " + line + "\n";
  }

  const std::filesystem::path file_;
  std::size_t at_ = 0;
};

class CommitProcesses : public ::testing::Test {
 protected:
  void SetUp() override {
    publish();
    start_coordinator();
    for (unsigned r = 0; r < kRanks; ++r) start_rank(r);
    ASSERT_TRUE(all_serve_newest()) << ledger_.wrong;
  }
  void publish() { put("newest", std::to_string(++number_)); }
  /// Whole at once.
  void put(const std::string& name, const std::string& text) {
    const auto path = dir_.path() / name;
    { std::ofstream(path.string() + ".new") << text << '\n'; }
    std::filesystem::rename(path.string() + ".new", path);
  }

  void start(const std::string& name, std::vector<std::string> args) {
    args.insert(args.begin(), DELTASYNC_COMMIT_PROCESS);
    children_[name] = std::make_unique<Process>(std::move(args), dir_.path() / ("out-" + name));
  }
  void start_coordinator() {
    const auto out = dir_.path() / "out-coordinator";
    std::filesystem::remove(out);
    start("coordinator",
          {"coordinator", dir_.path().string(), "coordinator", std::to_string(port_.number()), std::to_string(kRanks)});
    ASSERT_TRUE(eventually([&] {
      std::ifstream in(out);
      std::string line;
      return std::getline(in, line) && !in.eof();
    }));
  }
  void start_rank(unsigned r) {
    const std::string name = "rank" + std::to_string(r);
    start(name, {"rank", dir_.path().string(), name, std::to_string(port_.number()), std::to_string(kRanks),
                 std::to_string(r), kKinds[r]});
  }
  void start_again(const std::string& name) {
    // Reaped first: the old process is proved dead before there is a new one.
    children_.erase(name);
    if (name == "coordinator") return start_coordinator();
    start_rank(static_cast<unsigned>(name.back() - '0'));
  }

  bool all_serve_newest() {
    return eventually([&] {
             if (!ledger_.read()) return true;
             return std::all_of(std::begin(ledger_.ranks), std::end(ledger_.ranks),
                                [&](const Ledger::Rank& r) { return r.serves == std::to_string(number_); });
           }) &&
           ledger_.wrong.empty();
  }

  void arm(const std::string& name, const std::string& signal, const std::string& point) {
    put("arm-" + name, signal + " " + point);
  }
  bool fired(const std::string& name) {
    return eventually([&] { return !std::filesystem::exists(dir_.path() / ("arm-" + name)); });
  }
  bool becomes(const std::string& name, int how) {
    return eventually([&] { return children_.at(name)->has(how); });
  }

  void kill_at(const std::string& name, const std::string& point) {
    SCOPED_TRACE(name + " killed at \"" + point + "\"");
    arm(name, "KILL", point);
    publish();
    ASSERT_TRUE(fired(name)) << "it never came there";
    ASSERT_TRUE(becomes(name, WEXITED));
    EXPECT_TRUE(ledger_.read()) << ledger_.wrong;
    start_again(name);
    EXPECT_TRUE(all_serve_newest()) << ledger_.wrong;
  }
  void stop_at(const std::string& name, const std::string& point) {
    SCOPED_TRACE(name + " stopped at \"" + point + "\"");
    arm(name, "STOP", point);
    publish();
    ASSERT_TRUE(fired(name)) << "it never came there";
    ASSERT_TRUE(becomes(name, WSTOPPED));
    // The others come to whatever they can come to, which is nothing new; longer than the coordinator waits for one.
    publish();
    std::this_thread::sleep_for(std::chrono::milliseconds(1800));
    EXPECT_TRUE(ledger_.read()) << ledger_.wrong;
    ::kill(children_.at(name)->pid(), SIGCONT);
    EXPECT_TRUE(all_serve_newest()) << ledger_.wrong;
  }

  TempDir dir_;
  Ledger ledger_{dir_.path() / "served"};
  std::uint64_t number_ = 0;
  const test::HeldPort port_;
  std::map<std::string, std::unique_ptr<Process>> children_;
};

TEST_F(CommitProcesses, VersionAfterVersion) {
  for (int i = 0; i < 3; ++i) {
    publish();
    ASSERT_TRUE(all_serve_newest()) << ledger_.wrong;
  }
}

TEST_F(CommitProcesses, RankKilledAtEachStep) {
  for (const char* point : {"work pull", "worked pull", "work pause", "worked pause", "report prepared", "work commit",
                            "worked commit", "report committed", "ordered finish", "work forget"}) {
    kill_at("rank1", point);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CommitProcesses, RankWithTheWholeModelKilledAtEachStep) {
  for (const char* point : {"work pull", "worked pause", "work commit", "worked commit", "ordered finish"}) {
    kill_at("rank0", point);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CommitProcesses, CoordinatorKilledAtEachStep) {
  for (const char* point : {"order stage", "order prepare", "log commit", "logged commit", "order commit", "log finish",
                            "logged finish", "order finish"}) {
    kill_at("coordinator", point);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CommitProcesses, RanksAreInDoubtWhileTheCoordinatorIsAway) {
  arm("coordinator", "KILL", "log finish");
  publish();
  ASSERT_TRUE(fired("coordinator"));
  ASSERT_TRUE(becomes("coordinator", WEXITED));
  EXPECT_TRUE(eventually([&] {
    return !ledger_.read() || std::all_of(std::begin(ledger_.ranks), std::end(ledger_.ranks),
                                          [](const Ledger::Rank& r) { return r.doubts > 0; });
  })) << "all have committed, and nobody knows";
  for (const Ledger::Rank& r : ledger_.ranks) EXPECT_TRUE(r.serves.empty());
  start_again("coordinator");
  EXPECT_TRUE(all_serve_newest()) << ledger_.wrong;
}

TEST_F(CommitProcesses, RankStoppedAtEachStep) {
  for (const char* point : {"work pull", "worked pause", "report prepared", "work commit", "worked commit",
                            "report committed", "ordered finish"}) {
    stop_at("rank1", point);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CommitProcesses, CoordinatorStoppedAtEachStep) {
  for (const char* point : {"order prepare", "log commit", "logged commit", "log finish", "logged finish"}) {
    stop_at("coordinator", point);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CommitProcesses, EverybodyKilled) {
  arm("coordinator", "KILL", "logged commit");
  publish();
  ASSERT_TRUE(fired("coordinator"));
  ASSERT_TRUE(becomes("coordinator", WEXITED));
  for (unsigned r = 0; r < kRanks; ++r) ::kill(children_.at("rank" + std::to_string(r))->pid(), SIGKILL);
  for (unsigned r = 0; r < kRanks; ++r) ASSERT_TRUE(becomes("rank" + std::to_string(r), WEXITED));
  start_again("coordinator");
  for (unsigned r = 0; r < kRanks; ++r) start_again("rank" + std::to_string(r));
  EXPECT_TRUE(all_serve_newest()) << ledger_.wrong;
}

}  // namespace
}  // namespace deltasync::test
