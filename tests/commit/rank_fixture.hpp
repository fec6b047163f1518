// Ranks with pretended receivers and engines: two of a coordinator over TCP, or one whose coordinator says what the
// test says.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>

#include "base/deadline.hpp"
#include "commit/participant.hpp"
#include "tests/commit/fake_receiver.hpp"
#include "tests/commit/server_fixture.hpp"

namespace deltasync::commit {

class CountingEngine final : public Engine {
 public:
  Status pause(Deadline /*at once*/) override {
    if (pause_throws) throw std::runtime_error("no such step");
    if (half_pause) admits = false;
    if (half_pause || refuse_pause) {
      ++refused;
      return Error(Errc::timed_out, "a step does not end");
    }
    admits = false;
    runs = false;
    return {};
  }
  Status resume(const Version& version, Deadline /*at once*/) override {
    if (resume_throws) throw 7;  // NOLINT(hicpp-exception-baseclass): what a user's may be
    if (refuse_resume) {
      ++refused;
      return Error(Errc::io, "no cache");
    }
    label = version.label;
    runs = true;
    admits = true;
    return {};
  }
  std::atomic<bool> admits{true};  ///< new requests
  std::atomic<bool> runs{true};
  std::atomic<bool> refuse_pause{false};
  std::atomic<bool> half_pause{false};  ///< admits nothing any more, and then fails
  std::atomic<bool> refuse_resume{false};
  std::atomic<bool> pause_throws{false};
  std::atomic<bool> resume_throws{false};
  std::atomic<unsigned> refused{0};
  std::string label;  // read when nothing runs
};

class CommitRanks : public CommitServer {
 protected:
  struct Member {
    std::unique_ptr<FakeReceiver> receiver;
    CountingEngine engine;
    std::unique_ptr<ParticipantImpl> rank;  // before the others
  };

  void SetUp() override { trainer_.publish("one"); }
  ParticipantOptions options(std::uint32_t rank, bool by_calls = false) {
    ParticipantOptions o;
    o.rank = rank;
    o.ranks = 2;
    o.coordinator = "127.0.0.1:" + std::to_string(server_->port());
    o.token = kToken;
    if (by_calls) {
      o.exchange = [this](const Report& report, Deadline hold, std::stop_token stop) {
        return server_->exchange(report, hold, std::move(stop));
      };
    }
    return o;
  }
  void join(std::uint32_t rank, bool by_calls = false) { join(rank, options(rank, by_calls)); }
  void join(std::uint32_t rank, ParticipantOptions options, bool never_comes = false) {
    Member& m = members_[rank];
    m.rank.reset();
    m.receiver = std::make_unique<FakeReceiver>(trainer_);
    m.receiver->never_comes = never_comes;
    auto made = ParticipantImpl::start(std::move(options), *m.receiver, m.engine);
    ASSERT_TRUE(made) << made.error().to_string();
    m.rank = *std::move(made);
  }
  /// Both ranks serve the first version.
  void bring_up() {
    start();
    join(0);
    join(1);
    ASSERT_TRUE(server_->update(Want(), soon()));
    ASSERT_TRUE(all_serve("one"));
  }
  static Want newer() {
    Want want;
    want.newer = true;
    return want;
  }
  /// Both have an update to wait for that wants a version still to come.
  bool both_wait() const {
    return eventually([&] { return members_[0].receiver->waits && members_[1].receiver->waits; });
  }
  /// The coordinator is gone, and its log with it.
  void lose_log() {
    server_.reset();
    std::filesystem::remove(dir_.path() / "commit.log");
  }
  bool all_serve(const std::string& label) {
    return eventually([&] {
      return std::all_of(std::begin(members_), std::end(members_), [&](const Member& m) {
        const auto v = m.rank->serving();
        return v && v->label == label && m.engine.runs;
      });
    });
  }
  bool memories_are(std::uint64_t number) const {
    return members_[0].receiver->memory == number && members_[1].receiver->memory == number;
  }

  FakeTrainer trainer_;
  Member members_[2];
};

/// One rank whose coordinator says what the test says.
class CommitRank : public ::testing::Test {
 protected:
  using Script = std::function<Result<Order>(const Report&)>;

  void SetUp() override { trainer_.publish("one"); }
  void start(Script script, ParticipantOptions o = {}) {
    o.ranks = 1;
    o.exchange = [this, script = std::move(script)](const Report& report, Deadline /*at once*/,
                                                    std::stop_token /*at once*/) -> Result<Order> {
      ++asked_;
      DS_ASSIGN(Order order, script(report));
      order.log = 7;
      order.term = 1;
      order.step = ++step_;
      order.incarnation = report.incarnation;
      return order;
    };
    auto made = ParticipantImpl::start(std::move(o), receiver_, engine_);
    ASSERT_TRUE(made) << made.error().to_string();
    rank_ = *std::move(made);
  }
  /// A rank on its way to serve a version.
  static Order bring(const Report& report, VersionId to) {
    Order order;
    order.kind = report.holds == to ? OrderKind::serve : OrderKind::catch_up;
    order.version.id = to;
    return order;
  }

  FakeTrainer trainer_;
  FakeReceiver receiver_{trainer_};
  CountingEngine engine_;
  std::atomic<unsigned> asked_{0};
  std::uint64_t step_ = 0;                 // of the asking thread
  std::unique_ptr<ParticipantImpl> rank_;  // last: it uses all of the above
};

}  // namespace deltasync::commit
