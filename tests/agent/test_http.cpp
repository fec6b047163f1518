#include <sys/socket.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "deltasync/timeline.hpp"
#include "net/http_server.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

using nlohmann::json;

class Http : public AgentTest {
 protected:
  struct Answer {
    int status = 0;
    std::string head;
    std::string body;
  };
  /// Sends raw text and reads until the agent closes.
  std::string raw(const std::string& text) {
    auto fd = net::connect_tcp("127.0.0.1", agent_->http_port(), test_deadline());
    if (!fd) return {};
    std::size_t sent = 0;
    EXPECT_TRUE(eventually([&] {
      while (sent < text.size()) {
        const ssize_t n = ::send(fd->get(), text.data() + sent, text.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) return false;
        reset_ = reset_ || n < 0;
        if (n < 0) return true;
        sent += static_cast<std::size_t>(n);
      }
      return true;
    }));
    std::string answer;
    char piece[4096];
    EXPECT_TRUE(eventually([&] {
      for (;;) {
        const ssize_t n = ::recv(fd->get(), piece, sizeof piece, MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) return false;
        reset_ = reset_ || n < 0;
        if (n <= 0) return true;
        answer.append(piece, static_cast<std::size_t>(n));
      }
    }));
    return answer;
  }
  Answer get(const std::string& target, const std::string& method = "GET") {
    const std::string text = raw(method + " " + target + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    Answer answer;
    const auto split = text.find("\r\n\r\n");
    if (text.size() < 12 || split == std::string::npos) return answer;
    answer.status = std::stoi(text.substr(9, 3));
    answer.head = text.substr(0, split);
    answer.body = text.substr(split + 4);
    return answer;
  }

  bool reset_ = false;  ///< a connection was ended by a reset
};

TEST_F(Http, Healthz) {
  start_agent();
  const Answer answer = get("/healthz");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, "ok\n");
}

TEST_F(Http, StatusBeforeAndAfterVersions) {
  start_agent();
  json page = json::parse(get("/v1/status").body);
  EXPECT_TRUE(page["active"].is_null());
  EXPECT_TRUE(page["generations"].empty());
  next_version();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  page = json::parse(get("/v1/status").body);
  EXPECT_EQ(page["name"], "test");
  EXPECT_EQ(page["active"]["version"]["number"], 2);
  EXPECT_EQ(page["active"]["version"]["label"], "step_2");
  EXPECT_EQ(page["active"]["root"], to_string(served()->root));
  EXPECT_EQ(page["ring"]["entries"].size(), 1u);
  EXPECT_EQ(page["ring"]["entries"][0]["bytes"], served()->delta_bytes);
  EXPECT_EQ(page["generations"][0]["halves"].size(), 2u);
  EXPECT_EQ(page["leases"].size(), 1u);
  EXPECT_EQ(page["plans"][0]["mode"], "full");
  EXPECT_EQ(page["connections"][0]["name"], "test client");
  EXPECT_EQ(page["connections"][0]["last_mode"], "full");
  EXPECT_EQ(page["writers"][0]["slot"], 0);
}

TEST_F(Http, Layout) {
  start_agent();
  EXPECT_EQ(get("/v1/layout").status, 404);
  next_version();
  json page = json::parse(get("/v1/layout").body);
  EXPECT_EQ(page["digest"], to_string(model_.layout->digest()));
  EXPECT_EQ(page["tensors"], model_.layout->tensors().size());
  EXPECT_FALSE(page.contains("tensor_list"));
  page = json::parse(get("/v1/layout?tensors=1").body);
  ASSERT_EQ(page["tensor_list"].size(), model_.layout->tensors().size());
  EXPECT_EQ(page["tensor_list"][0]["name"], model_.layout->tensors()[0].spec.name);
}

TEST_F(Http, MetricsCount) {
  start_agent();
  EXPECT_NE(get("/metrics").body.find("deltasync_writers 0\n"), std::string::npos);
  next_version();
  next_version();
  auto c = client();
  wire::PlanRequest plan = ask();
  plan.layout.bytes[0] ^= 1;
  EXPECT_FALSE(c.plan(plan));
  const std::string text = get("/metrics").body;
  for (const char* line : {"deltasync_versions_total 2\n", "deltasync_deltas_total 1\n",
                           "deltasync_errors_total{code=\"layout_mismatch\"} 1\n", "deltasync_ring_entries 1\n",
                           "# TYPE deltasync_pulls_total counter\n", "deltasync_writers 1\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

/// Every name that dashboards may have from before, so that none is lost.
TEST_F(Http, MetricsKeepTheirNames) {
  start_agent();
  const std::string text = get("/metrics").body;
  for (const char* name : {"versions_total",
                           "deltas_total",
                           "delta_bytes_total",
                           "elements_changed_total",
                           "elements_compared_total",
                           "encode_seconds_total",
                           "batches_diffed_overlapped_total",
                           "batches_diffed_after_total",
                           "tiles_damaged_total",
                           "scrub_bytes_total",
                           "scrub_passes_total",
                           "digest_seconds_total",
                           "merges_total",
                           "merge_bytes_total",
                           "merge_seconds_total",
                           "merges_failed_total",
                           "merge_hits_total",
                           "compacts_total",
                           "compact_bytes_total",
                           "compact_seconds_total",
                           "compacts_failed_total",
                           "pulls_total{mode=\"up_to_date\"}",
                           "pulls_total{mode=\"delta\"}",
                           "pulls_total{mode=\"full\"}",
                           "sent_bytes_total{kind=\"extent\"}",
                           "sent_bytes_total{kind=\"frames\"}",
                           "sent_bytes_total{kind=\"raw_tiles\"}",
                           "sent_bytes_total{kind=\"digests\"}",
                           "sent_bytes_total{kind=\"layout\"}",
                           "leases_total",
                           "leases_revoked_total",
                           "plans_expired_total",
                           "connections_total",
                           "connections_refused_total",
                           "handshakes_failed_total",
                           "http_requests_total",
                           "errors_total{code=\"gone\"}",
                           "connections",
                           "leases",
                           "ring_bytes",
                           "ring_entries",
                           "merged_bytes",
                           "merged_entries",
                           "version_number",
                           "delta_density",
                           "encode_seconds",
                           "half_bytes"}) {
    EXPECT_NE(text.find("\ndeltasync_" + std::string(name) + " "), std::string::npos) << name;
  }
}

TEST_F(Http, MetricsMeasureDurations) {
  start_agent();
  next_version();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  ASSERT_TRUE(c.release(reply->plan));
  const std::string text = get("/metrics").body;
  for (const char* line : {"deltasync_diff_duration_seconds_count 1\n", "deltasync_pull_duration_seconds_count 1\n",
                           "deltasync_pull_duration_seconds_bucket{le=\"+Inf\"} 1\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

/// Of Prometheus itself: format and naming.
TEST_F(Http, MetricsAreWhatPromtoolExpects) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool is not here (Debian package prometheus)";
  }
  start_agent();
  next_version();
  next_version();
  const std::filesystem::path page = dir_.path() / "metrics.txt";
  std::ofstream(page) << get("/metrics").body;
  EXPECT_EQ(std::system(("promtool check metrics <" + page.string()).c_str()), 0);
}

TEST_F(Http, OtherTargetsAndMethodsAreRefused) {
  start_agent();
  EXPECT_EQ(get("/").status, 404);
  EXPECT_EQ(get("/v1/statusx").status, 404);
  EXPECT_EQ(get("/healthz", "POST").status, 405);
  const Answer head = get("/healthz", "HEAD");
  EXPECT_EQ(head.status, 200);
  EXPECT_TRUE(head.body.empty());
  EXPECT_NE(head.head.find("Content-Length: 3"), std::string::npos) << head.head;
}

TEST_F(Http, BadRequestsAreRefused) {
  start_agent();
  EXPECT_EQ(raw("this is no http\r\n\r\n").substr(9, 3), "400");
  EXPECT_EQ(raw("GET / HTTP/1.1\r\nX: " + std::string(9000, 'x') + "\r\n\r\n").substr(9, 3), "431");
  EXPECT_EQ(raw("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5000\r\n\r\n").substr(9, 3), "413");
  EXPECT_EQ(get("/healthz", "POST").status, 405);
  EXPECT_EQ(agent_->core().metrics().http_requests, 4u) << "refusals count";
}

TEST_F(Http, ARefusalArrivesThoughItsBodyIsSent) {
  options_.http->request = kTestLimit;  // for as long the rest of a body is waited for
  start_agent();
  const std::string head = "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 16000000\r\n\r\n";
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(raw(head + std::string(16'000'000, 'b')).substr(0, 12), "HTTP/1.1 413");
  }
  EXPECT_FALSE(reset_) << "a reset may overtake the answer";
}

TEST_F(Http, ASilentPeerIsDropped) {
  options_.http->request = std::chrono::milliseconds(50);
  start_agent();
  EXPECT_EQ(raw("GET /healthz HTT"), "");  // returns once the agent has closed
}

/// What a monitor sends, then the connection stays open.
UniqueFd rest_after_one_page(std::uint16_t port) {
  auto fd = net::connect_tcp("127.0.0.1", port, test_deadline()).value();
  const std::string request = "GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n";
  EXPECT_EQ(::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string answer;
  char piece[4096];
  EXPECT_TRUE(eventually([&] {
    const ssize_t n = ::recv(fd.get(), piece, sizeof piece, MSG_DONTWAIT);
    if (n > 0) answer.append(piece, static_cast<std::size_t>(n));
    return answer.ends_with("ok\n");
  }));
  return fd;
}

TEST_F(Http, AProbeFindsAPlaceAmongThoseWhoRest) {
  options_.http->connections_max = 8;
  options_.http->keep_alive = std::chrono::hours(1);
  start_agent();
  std::vector<UniqueFd> resting;
  for (int i = 0; i < 20; ++i) resting.push_back(rest_after_one_page(agent_->http_port()));
  EXPECT_EQ(get("/healthz").body, "ok\n");
  const auto closed = [](const UniqueFd& fd) {
    char byte = 0;
    return ::recv(fd.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0;
  };
  EXPECT_TRUE(eventually([&] { return closed(resting.front()); })) << "who has rested for longest left";
  EXPECT_FALSE(closed(resting.back()));
}

TEST_F(Http, AProbeFindsAPlaceAmongThoseWhoSayNothing) {
  options_.http->connections_max = 8;
  options_.http->request = std::chrono::hours(1);
  start_agent();
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 64; ++i) {
    silent.push_back(net::connect_tcp("127.0.0.1", agent_->http_port(), test_deadline()).value());
    ASSERT_EQ(::send(silent.back().get(), "GET /he", 7, MSG_NOSIGNAL), 7);
  }
  EXPECT_EQ(get("/healthz").body, "ok\n");
}

/// Half of the places are for pages that are there at once.
TEST_F(Http, AProbeFindsAPlaceAmongThoseWhoWaitForLongPages) {
  std::atomic<bool> go{false};
  options_.http->connections_max = 4;
  options_.http->before_deferred = [&go] { eventually([&go] { return go.load(); }); };
  start_agent();
  std::vector<UniqueFd> waiting;
  const std::string request = "GET /v1/layout HTTP/1.1\r\nHost: t\r\n\r\n";
  for (int i = 0; i < 16; ++i) {
    waiting.push_back(net::connect_tcp("127.0.0.1", agent_->http_port(), test_deadline()).value());
    ASSERT_EQ(::send(waiting.back().get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
  }
  EXPECT_TRUE(eventually([&] { return agent_->core().metrics().http_requests >= 3; }));
  EXPECT_EQ(get("/healthz").body, "ok\n");
  EXPECT_EQ(get("/v1/layout").status, 503);
  go = true;
  EXPECT_TRUE(eventually([&] { return get("/v1/layout").status == 404; }));
}

TEST_F(Http, BeyondLoopbackOnlyOnRequest) {
  options_.http->listen.host = "0.0.0.0";
  const auto open = Agent::start(options_);
  ASSERT_FALSE(open);
  EXPECT_EQ(open.error().code(), Errc::unauthenticated);
  options_.http->allow_remote = true;
  start_agent();
  EXPECT_EQ(get("/healthz").status, 200);
}

TEST_F(Http, TheTimelineIfItIsRecorded) {
  start_agent();
  Answer answer = get("/v1/trace");
  EXPECT_EQ(answer.status, 404);
  EXPECT_NE(answer.body.find("--trace"), std::string::npos);
  stop_agent();

  options_.trace_file = dir_.path() / "trace.json";
  start_agent();
  EXPECT_TRUE(std::filesystem::exists(options_.trace_file)) << "one that cannot be written is known at the start";
  next_version();
  next_version();
  const auto published = [](const json& trace) {
    std::size_t n = 0;
    for (const json& event : trace["traceEvents"]) n += event["name"] == "publish" ? 1 : 0;
    return n;
  };
  // A span is there once it has ended, a moment after the version is served.
  EXPECT_TRUE(eventually([&] {
    answer = get("/v1/trace");
    return answer.status == 200 && published(json::parse(answer.body)) >= 2;
  })) << answer.body;
  stop_agent();
  stop_timeline();
  std::ifstream in(options_.trace_file);
  EXPECT_GE(published(json::parse(in)), 2u);
}

// ---- answers that take long to send --------------------------------------------------------------------------------

constexpr std::size_t kLargeBytes = 48u << 20;  ///< more than sockets hold

/// A server with one large page, and a client that asks for it, waits, and then reads what it gets.
std::size_t bytes_of_large_page(std::uint64_t bytes_per_s_min) {
  boost::asio::io_context io;
  net::HttpOptions options;
  options.request = std::chrono::milliseconds(100);
  options.reply_bytes_per_s_min = bytes_per_s_min;
  auto server = net::HttpServer::listen(io, options, [](const net::HttpQuestion&) {
    return net::HttpPage{200, "text/plain", std::string(kLargeBytes, 'x')};
  });
  EXPECT_TRUE(server) << server.error().to_string();
  const auto work = boost::asio::make_work_guard(io);
  std::thread runs([&io] { io.run(); });
  std::size_t got = 0;
  {
    const auto fd = net::connect_tcp("127.0.0.1", (*server)->port(), test_deadline()).value();
    const std::string request = "GET / HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n";
    EXPECT_EQ(::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
    std::this_thread::sleep_for(std::chrono::seconds(1));
    std::vector<char> piece(1u << 20);
    EXPECT_TRUE(eventually([&] {
      for (;;) {
        const ssize_t n = ::recv(fd.get(), piece.data(), piece.size(), MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) return false;
        if (n <= 0) return true;
        got += static_cast<std::size_t>(n);
      }
    }));
  }
  (*server)->stop();
  io.stop();
  runs.join();
  return got;
}

TEST(HttpAnswers, LargeOnesHaveTimeThatGrowsWithThem) {
  EXPECT_GT(bytes_of_large_page(1u << 20), kLargeBytes);
}

TEST(HttpAnswers, WhoDoesNotReadIsDropped) {
  EXPECT_LT(bytes_of_large_page(std::uint64_t{1} << 50), kLargeBytes);
}

TEST_F(Http, MayBeOff) {
  options_.http.reset();
  start_agent();
  EXPECT_EQ(agent_->http_port(), 0);
}

}  // namespace
}  // namespace deltasync::agent
