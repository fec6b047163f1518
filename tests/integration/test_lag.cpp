// How far behind receivers are, as they ask and as their agent knows; what its pages say of it.
#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>

#include "agent/http/health.hpp"
#include "agent/http/metrics_page.hpp"
#include "agent/http/status.hpp"
#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "format/wire_report.hpp"
#include "tests/integration/receivers.hpp"
#include "tests/support/attacker.hpp"
#include "tests/support/held_port.hpp"

namespace deltasync::agent {
namespace {

using nlohmann::json;

class Lags : public ReceiverTest {
 protected:
  AgentParts parts() const { return {agent_->core(), agent_->pull_server(), nullptr, 0, {}}; }
  std::vector<ReceiverRow> rows() const { return agent_->pull_server().receivers(); }
  static Lag lag(const Receiver& receiver) { return receiver.lag(test_deadline()); }
  /// A report has no answer: it is there a moment after it was sent.
  bool hears(const VersionId& committed, const std::string& error_part = {}) const {
    return eventually([&] {
      const auto now = rows();
      return now.size() == 1 && now[0].committed.id == committed &&
             (error_part.empty() ? now[0].error.empty() : now[0].error.find(error_part) != std::string::npos);
    });
  }
  double metric(const std::string& line) const {
    const std::string text = "\n" + metrics_text(parts());
    const auto at = text.find("\n" + line + " ");
    EXPECT_NE(at, std::string::npos) << line << text;
    return at == std::string::npos ? -1 : std::stod(text.substr(at + line.size() + 2));
  }
};

TEST_F(Lags, CountsWhatCameAfterTheVersionThatIsHeld) {
  start_agent();
  next_version();
  const auto receiver = connect();
  EXPECT_FALSE(lag(*receiver).held);
  EXPECT_EQ(lag(*receiver).versions, 1u);
  pull(*receiver);
  Lag now = lag(*receiver);
  EXPECT_EQ(now.versions, 0u);
  EXPECT_EQ(now.seconds, 0.0);
  EXPECT_EQ(now.held->label, "step_1");
  EXPECT_EQ(now.newest->label, "step_1");
  EXPECT_EQ(now.last_error, "");
  next_version();
  next_version();
  now = lag(*receiver);
  EXPECT_EQ(now.versions, 2u);
  EXPECT_EQ(now.held->label, "step_1");
  EXPECT_EQ(now.newest->label, "step_3");
  EXPECT_GT(*now.seconds, *now.newest_age_s) << "since the first that is missing, not since the last";
  EXPECT_LT(*now.seconds, std::chrono::duration<double>(kTestLimit).count());
  pull(*receiver);
  EXPECT_EQ(lag(*receiver).versions, 0u);
}

TEST_F(Lags, IsToldWhileAPullWaits) {
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  std::stop_source stop;
  std::thread waits([&] {
    const auto pulled = receiver->pull({.newer = true}, CallContext(test_deadline(), stop.get_token()));
    EXPECT_EQ(pulled.error().code(), Errc::cancelled);
  });
  EXPECT_TRUE(eventually([&] { return agent_->core().metrics().pulls_full.load() == 1; }));
  EXPECT_EQ(lag(*receiver).versions, 0u);
  stop.request_stop();
  waits.join();
  EXPECT_EQ(lag(*receiver).last_error, "") << "a stop is no failure";
}

TEST_F(Lags, WhatNeverCameIsNoFailure) {
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  const auto none = receiver->pull({.newer = true}, Deadline::after(std::chrono::seconds(3)));
  EXPECT_EQ(none.error().code(), Errc::timed_out);
  EXPECT_EQ(lag(*receiver).last_error, "");
}

TEST_F(Lags, TheAgentKnowsWhatWasCommitted) {
  start_agent();
  next_version();
  const auto receiver = connect();
  EXPECT_TRUE(hears({})) << "who is connected and holds nothing is known";
  auto staged = receiver->pull({}, test_deadline());
  ASSERT_TRUE(staged);
  EXPECT_FALSE(rows()[0].committed.id.valid()) << "pulled is not committed";
  ASSERT_TRUE((*staged)->commit());
  EXPECT_TRUE(hears(served()->version.id)) << "at once, not with the next plan";
  EXPECT_EQ(rows()[0].committed.label, "step_1");
  ASSERT_TRUE((*staged)->rollback());
  EXPECT_TRUE(hears({}));
}

TEST_F(Lags, TheAgentHearsOfAFailureAndOfItsEnd) {
  start_agent();
  next_version();
  const auto receiver = connect();
  auto staged = receiver->pull({}, test_deadline());
  ASSERT_TRUE(staged);
  EXPECT_FALSE((*staged)->commit(Deadline::after(std::chrono::milliseconds(-1))));
  EXPECT_TRUE(hears({}, "deadline passed while beginning the commit"));
  EXPECT_NE(lag(*receiver).last_error.find("deadline passed while beginning the commit"), std::string::npos);
  EXPECT_EQ(metric("deltasync_receivers_failing"), 1);
  ASSERT_TRUE((*staged)->commit());
  EXPECT_TRUE(hears(served()->version.id));
  EXPECT_EQ(lag(*receiver).last_error, "");
  EXPECT_EQ(metric("deltasync_receivers_failing"), 0);
}

TEST_F(Lags, AnotherAgentHearsItWithTheConnection) {
  const test::HeldPort at;
  options_.pull.listen.port = at.number();
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  const VersionId held = served()->version.id;
  stop_agent();
  const Lag unheard = lag(*receiver);
  EXPECT_FALSE(unheard.heard_newest) << "it was never asked";
  start_agent();
  ASSERT_TRUE(eventually([&] { return served() != nullptr; }));
  const Lag now = lag(*receiver);
  EXPECT_EQ(now.heard_newest, now.newest);
  EXPECT_GE(now.heard_s.value(), 0);
  stop_agent();
  const Lag away = lag(*receiver);
  EXPECT_FALSE(away.versions);
  EXPECT_FALSE(away.newest);
  EXPECT_EQ(away.heard_newest, now.newest) << "what it said last";
  EXPECT_GT(away.heard_s.value(), now.heard_s.value());
  EXPECT_EQ(away.held->id, held);
  EXPECT_NE(away.last_error.find("asking the agent at 127.0.0.1:"), std::string::npos) << away.last_error;
  start_agent();
  EXPECT_TRUE(rows().empty());
  EXPECT_TRUE(eventually([&] { return served() != nullptr; }));
  const auto again = receiver->pull({}, test_deadline());
  ASSERT_TRUE(again) << again.error().to_string();
  EXPECT_EQ((*again)->report().mode, PullMode::up_to_date);
  EXPECT_TRUE(hears(held)) << "though it committed nothing here";
}

TEST_F(Lags, OfProtocol4TheBaseOfAPlanTells) {
  start_agent();
  next_version();
  auto old = Client::connect(port(), wire::Role::control, {}, 4);
  ASSERT_TRUE(old);
  ASSERT_TRUE(old->plan(ask_from_served()));
  EXPECT_TRUE(hears(served()->version.id));
  const auto refused = old->ask<wire::Lag>(wire::GetLag{});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::protocol) << "it is no message of protocol 4";
}

TEST_F(Lags, StatusHasALineForEachReceiver) {
  start_agent();
  next_version();
  auto receiver = connect();
  pull(*receiver);
  ASSERT_TRUE(hears(served()->version.id));
  next_version();
  json page = json::parse(status_json(parts()));
  ASSERT_EQ(page["receivers"].size(), 1u);
  const json& line = page["receivers"][0];
  EXPECT_EQ(line["name"], "receiver");
  EXPECT_EQ(line["host"], "127.0.0.1");
  EXPECT_EQ(line["connected"], true);
  EXPECT_EQ(line["committed"]["label"], "step_1");
  EXPECT_EQ(line["versions_behind"], 1);
  EXPECT_GT(line["seconds_behind"].get<double>(), 0);
  EXPECT_EQ(line["last_error"], "");
  EXPECT_GE(page["connections"].size(), 1u);
  receiver.reset();
  EXPECT_TRUE(eventually([&] { return rows()[0].connection == 0; }));
  page = json::parse(status_json(parts()));
  EXPECT_EQ(page["receivers"][0]["connected"], false) << "who has left is remembered for a while";
}

/// Whatever ended its last call: a stop closes the connection over which it would have said so.
TEST_F(Lags, AReceiverThatEndsIsNotLost) {
  start_agent();
  next_version();
  auto receiver = connect();
  pull(*receiver);
  auto stopped = connect();
  pull(*stopped);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(stopped->pull({.newer = true}, CallContext(test_deadline(), stop.get_token())).error().code(),
            Errc::cancelled);
  receiver.reset();
  stopped.reset();
  {
    auto c = client();
    ASSERT_TRUE(c.socket.send(1, wire::Report{7, {}, ""}, test_deadline()));
    ASSERT_TRUE(eventually([&] { return rows().size() == 3; }));
  }
  EXPECT_TRUE(eventually([&] { return metric("deltasync_receivers{state=\"connected\"}") == 0; }));
  EXPECT_EQ(metric("deltasync_receivers{state=\"left\"}"), 2);
  EXPECT_EQ(metric("deltasync_receivers{state=\"lost\"}"), 1);
  const json lines = json::parse(status_json(parts()))["receivers"];
  EXPECT_EQ(lines[0]["lost"], false);
  EXPECT_EQ(lines[1]["lost"], false);
  EXPECT_EQ(lines[2]["lost"], true);
}

/// A call that runs out of time closes the connection, whose answer may still come.
TEST_F(Lags, AReceiverThatEndsAfterWaitingInVainIsNotLost) {
  start_agent();
  next_version();
  std::atomic<bool> silent = false;
  const test::Attacker path(port(), [&](test::Way way, std::size_t n, test::Attacker::Bytes chunk) {
    if (silent && way == test::Way::to_client) return std::optional(std::vector<test::Attacker::Bytes>());
    return test::Attacker::honest()(way, n, std::move(chunk));
  });
  ReceiverOptions through = options();
  through.endpoint = "127.0.0.1:" + std::to_string(path.port());
  auto receiver = receiver::ReceiverImpl::connect(through, {}, test_deadline());
  ASSERT_TRUE(receiver) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target(model_.layout), test_deadline()));
  pull(**receiver);
  ASSERT_TRUE(hears(served()->version.id));
  silent = true;
  EXPECT_EQ((*receiver)->pull({.newer = true}, Deadline::after(std::chrono::milliseconds(50))).error().code(),
            Errc::timed_out);
  silent = false;
  receiver->reset();
  EXPECT_TRUE(eventually([&] { return rows()[0].connection == 0; }));
  EXPECT_FALSE(rows()[0].lost) << "it has said goodbye";
}

/// The preferred agent is there again: the one that it had until then need not worry.
TEST_F(Lags, AReceiverThatGoesOnAtAnotherAgentIsNotLost) {
  start_agent();
  next_version();
  const test::HeldPort preferred;
  ReceiverOptions both = options();
  both.endpoint = preferred.endpoint() + ",127.0.0.1:" + std::to_string(port());
  receiver::Tuning tuning;
  tuning.preferred_look = std::chrono::milliseconds(0);
  auto receiver = receiver::ReceiverImpl::connect(both, tuning, test_deadline(), 1);
  ASSERT_TRUE(receiver) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target(model_.layout), test_deadline()));
  pull(**receiver);
  ASSERT_TRUE(hears(served()->version.id));
  const test::TempDir dir;
  AgentOptions other_options = options_;
  other_options.core.shm_dir = dir.path();
  other_options.trainer.socket_path = (dir.path() / "agent.sock").string();
  other_options.pull.listen.port = preferred.number();
  const auto other = Agent::start(other_options);
  ASSERT_TRUE(other) << other.error().to_string();
  WriterOptions writer_options;
  writer_options.agent_socket = other_options.trainer.socket_path;
  const auto writer = Writer::attach(model_.layout, make_sidecar(*model_.layout), writer_options, test_deadline());
  ASSERT_TRUE(writer) << writer.error().to_string();
  ASSERT_TRUE(offload(**writer, model_.half, number_));
  const auto nothing_new =
      (*receiver)->pull({.newer = true, .wait_max = std::chrono::milliseconds(1)}, test_deadline());
  EXPECT_FALSE(nothing_new);
  EXPECT_EQ((*other)->pull_server().receivers().size(), 1u) << "it is there";
  EXPECT_TRUE(eventually([&] { return rows()[0].connection == 0; }));
  EXPECT_FALSE(rows()[0].lost);
}

TEST_F(Lags, AConnectionReportsForOneReceiver) {
  start_agent();
  next_version();
  auto c = client();
  ASSERT_TRUE(c.socket.send(1, wire::Report{7, {}, ""}, test_deadline()));
  ASSERT_TRUE(eventually([&] { return rows().size() == 1; }));
  ASSERT_TRUE(c.socket.send(2, wire::Report{8, {}, ""}, test_deadline()));
  EXPECT_TRUE(eventually([&] { return rows()[0].connection == 0; })) << "the connection is over";
  EXPECT_EQ(rows().size(), 1u);
}

TEST_F(Lags, MetricsOfReceiversAreBounded) {
  start_agent();
  next_version();
  next_version();
  const VersionId newest = served()->version.id;
  std::vector<decltype(client())> clients;
  for (std::uint64_t i = 1; i <= 130; ++i) {
    auto& c = clients.emplace_back(client());
    // The last ones have the version before.
    const VersionId held{newest.epoch, i > 110 ? newest.number - 1 : newest.number};
    ASSERT_TRUE(c.socket.send(i, wire::Report{i, {held, {}}, i == 3 ? "no space" : ""}, test_deadline()));
  }
  ASSERT_TRUE(eventually([&] { return rows().size() == 130; }));
  EXPECT_EQ(metric("deltasync_receivers{state=\"connected\"}"), 130);
  EXPECT_EQ(metric("deltasync_receivers_left_out"), 30);
  EXPECT_EQ(metric("deltasync_receivers_failing"), 1);
  EXPECT_EQ(metric("deltasync_receivers_versions_behind_max"), 1);
  EXPECT_GT(metric("deltasync_receivers_seconds_behind_max"), 0);
  const std::string text = metrics_text(parts());
  std::size_t lines = 0;
  for (auto at = text.find("\ndeltasync_receiver_versions_behind{"); at != std::string::npos;
       at = text.find("\ndeltasync_receiver_versions_behind{", at + 1)) {
    ++lines;
  }
  EXPECT_EQ(lines, 100u);
  EXPECT_EQ(metric("deltasync_receiver_versions_behind{receiver=\"test client\",host=\"127.0.0.1\",n=\"129\"}"), 1)
      << "those that are behind have lines";
  EXPECT_GT(metric("deltasync_version_age_seconds"), 0);
}

TEST_F(Lags, OffloadsAreMeasured) {
  start_agent();
  next_version();
  EXPECT_TRUE(eventually([&] { return metrics().offload.count() == 1; }));
  EXPECT_EQ(metrics().guard.count(), 1u);
}

TEST_F(Lags, HealthTellsOfDamageUntilTheNextVersion) {
  start_agent();
  EXPECT_EQ(ready_page(parts()).status, 503u);
  EXPECT_EQ(health_page(parts()).status, 200u);
  next_version();
  EXPECT_EQ(ready_page(parts()).status, 200u);
  EXPECT_EQ(health_page(parts()).body, "ok\n");
  const auto segment = shm::Segment::attach(served()->generation->segment->path()).value();
  const Tensor& tensor = model_.layout->tensors()[0];
  segment->half(served()->half.half)[tensor.offset] ^= std::byte{4};
  const std::uint64_t tile = tensor.first_tile;
  agent_->core().damage().doubt(served()->half, {&tile, 1}, "the test");
  EXPECT_TRUE(eventually([&] { return health_page(parts()).status == 503; }));
  const json page = json::parse(health_page(parts()).body);
  EXPECT_EQ(page["status"], "damaged");
  EXPECT_EQ(page["tiles_damaged"], 1);
  EXPECT_NE(page["tiles"][0].get<std::string>().find(tensor.spec.name), std::string::npos) << page;
  EXPECT_EQ(metric("deltasync_served_tiles_damaged"), 1);
  EXPECT_EQ(ready_page(parts()).status, 200u) << "it is served as it is";
  next_version();
  EXPECT_EQ(health_page(parts()).status, 200u);
  EXPECT_EQ(metric("deltasync_served_tiles_damaged"), 0);
}

}  // namespace
}  // namespace deltasync::agent
