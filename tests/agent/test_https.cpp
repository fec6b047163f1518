// The status pages over TLS: who may see them, what a wrong, expired or missing certificate comes to, HTTP where HTTPS
// is due and the other way round, and peers whose handshakes never end.
#include <gmock/gmock.h>

#include <sys/socket.h>

#include <cmath>

#include "net/http_server.hpp"
#include "net/tls.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/certificates.hpp"
#include "tools/cli/http_get.hpp"

namespace deltasync::agent {
namespace {

using test::local_server;
using test::with;
using ::testing::HasSubstr;

class Https : public AgentTest {
 protected:
  /// Receivers' port and pages alike.
  void start_with(const TlsOptions& tls) {
    auto made = net::Tls::server(tls);
    ASSERT_TRUE(made) << made.error().to_string();
    options_.pull.tls = *made;
    options_.http->tls = *made;
    start_agent();
  }
  Result<std::string> get(const std::string& target, const TlsOptions& tls,
                          const std::string& host = "localhost") const {
    return tools::http_get({{host, agent_->http_port()}, tls}, target, test_deadline());
  }
  void expect_refused(const TlsOptions& tls, Errc code, const std::string& says,
                      const std::string& host = "localhost") {
    const auto page = get("/healthz", tls, host);
    ASSERT_FALSE(page);
    EXPECT_EQ(page.error().code(), code) << page.error().to_string();
    EXPECT_THAT(page.error().message(), HasSubstr(says));
  }
  UniqueFd dial() const { return net::connect_tcp("127.0.0.1", agent_->http_port(), test_deadline()).value(); }
  /// Says this without TLS, and hears all until the agent closes.
  std::string raw(const std::string& text) const {
    const UniqueFd fd = dial();
    EXPECT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
    std::string answer;
    char piece[4096];
    EXPECT_TRUE(eventually([&] {
      const ssize_t n = ::recv(fd.get(), piece, sizeof piece, MSG_DONTWAIT);
      if (n > 0) answer.append(piece, static_cast<std::size_t>(n));
      return n == 0 || (n < 0 && errno != EAGAIN);
    }));
    return answer;
  }

  const test::TestTls tls_{dir_.path()};
};

TEST_F(Https, PagesShowTheAgentsCertificate) {
  start_with(tls_.server());
  next_version();
  for (const char* host : {"localhost", "127.0.0.1"}) {
    const auto page = get("/healthz", tls_.client(), host);
    ASSERT_TRUE(page) << page.error().to_string();
    EXPECT_EQ(*page, "ok\n");
  }
  EXPECT_THAT(get("/v1/status", tls_.client()).value(), HasSubstr("\"step_1\""));
  EXPECT_THAT(get("/v1/layout?tensors=1", tls_.client()).value(), HasSubstr("tensor_list"));
  EXPECT_EQ(agent_->core().metrics().http_requests, 4u);
}

TEST_F(Https, APageOfManyRecordsCrosses) {
  constexpr std::size_t kBytes = 20u << 20;  // more than sockets hold
  boost::asio::io_context io;
  net::HttpOptions options;
  options.tls = *net::Tls::server(tls_.server());
  auto server = net::HttpServer::listen(io, options, [](const net::HttpQuestion&) {
    return net::HttpPage{200, "text/plain", std::string(kBytes, 'x')};
  });
  ASSERT_TRUE(server);
  std::thread runs([&io] { io.run(); });
  const auto page = tools::http_get({{"localhost", (*server)->port()}, tls_.client()}, "/", test_deadline());
  (*server)->stop();
  runs.join();
  ASSERT_TRUE(page) << page.error().to_string();
  EXPECT_EQ(*page, std::string(kBytes, 'x'));
}

TEST_F(Https, AnAgentThatIsNotTheOneIsNotBelieved) {
  start_with(tls_.server());
  const test::TestCa other(dir_.path(), "other");
  TlsOptions trusting_another = tls_.client();
  trusting_another.ca = other.file();
  expect_refused(trusting_another, Errc::unauthenticated, "is not signed by a CA in");
  TlsOptions named = tls_.client();
  named.name = "other.example";
  expect_refused(named, Errc::unauthenticated, "for localhost, agent.example, 127.0.0.1, not for other.example");
  named.name = "agent.example";
  EXPECT_TRUE(get("/healthz", named));
}

TEST_F(Https, ASelfSignedCertificateIsBelievedOnlyIfItIsNamed) {
  const auto files = test::TestCa::self_signed(dir_.path(), "self", local_server());
  start_with(with(TlsOptions(), files));
  expect_refused(tls_.client(), Errc::unauthenticated, "but by itself");
  TlsOptions naming_it;
  naming_it.ca = files.cert;
  EXPECT_TRUE(get("/healthz", naming_it));
}

TEST_F(Https, AnExpiredCertificateIsRefusedUntilAnotherIsThere) {
  test::Wanted soon = local_server();
  soon.to = std::chrono::seconds(5);
  start_with(tls_.server(soon));  // read while it was good
  std::this_thread::sleep_for(std::chrono::seconds(6));
  expect_refused(tls_.client(), Errc::unauthenticated, "its certificate expired on 20");
  tls_.server();  // the same files
  EXPECT_TRUE(eventually([&] { return get("/healthz", tls_.client()).ok(); })) << "and nothing was restarted";
}

TEST_F(Https, MetricsSayWhenTheCertificateEndsAlsoAfterARenewalThatNobodyConnectedAfter) {
  const auto days = [](int count) {
    test::Wanted wanted = local_server();
    wanted.to = std::chrono::hours(24 * count);
    return wanted;
  };
  options_.pull.tls = *net::Tls::server(tls_.server(days(90)));  // and plain pages
  start_agent();
  const auto ends_in_days = [&] {
    const std::string page = get("/metrics", TlsOptions()).value();
    const std::string name = "\ndeltasync_tls_certificate_not_after_timestamp_seconds ";
    const auto at = page.find(name);
    if (at == std::string::npos) return -1.0;
    const auto now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    return (std::stod(page.substr(at + name.size())) - now) / 86400;
  };
  EXPECT_NEAR(ends_in_days(), 90, 0.01);
  tls_.server(days(30));
  EXPECT_TRUE(eventually([&] { return std::abs(ends_in_days() - 30) < 0.01; }));
}

TEST_F(Https, WithoutACertificateNoMetricIsMade) {
  start_agent();
  EXPECT_THAT(get("/metrics", TlsOptions()).value(), ::testing::Not(HasSubstr("tls_certificate")));
}

TEST_F(Https, MonitorsNeedNoCertificateThoughReceiversDo) {
  start_with(tls_.asking_server());
  EXPECT_TRUE(get("/healthz", tls_.client()));
  const auto receiver = Client::connect(agent_->port(), wire::Role::control);
  EXPECT_FALSE(receiver);
}

TEST_F(Https, AReceiversHandshakeHasFailedOnlyIfItHasBegun) {
  start_with(tls_.server());
  const auto& failed = agent_->core().metrics().handshakes_failed;
  for (const std::string said : {"", "\x16"}) {  // a probe; a TLS peer that goes away within its first record
    const UniqueFd fd = net::connect_tcp("127.0.0.1", agent_->port(), test_deadline()).value();
    EXPECT_EQ(::send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL), static_cast<ssize_t>(said.size()));
    ASSERT_TRUE(eventually([&] { return agent_->pull_server().connections() == 1; }));
    ::shutdown(fd.get(), SHUT_WR);
    ASSERT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
    EXPECT_EQ(failed, said.size());
  }
}

TEST_F(Https, CertificatesOfMonitorsAreCheckedOnRequestWhateverTheirNames) {
  options_.http->client_certificates = true;
  TlsOptions tls = tls_.asking_server();
  tls.allow = {"rollout"};  // who may pull
  start_with(tls);
  EXPECT_TRUE(get("/healthz", tls_.client("prometheus")));
  expect_refused(tls_.client(), Errc::unauthenticated, "give --tls-cert and --tls-key");
  const test::TestCa other(dir_.path(), "other");
  expect_refused(with(tls_.client(), other.issue("stranger", test::named("prometheus"))), Errc::unauthenticated,
                 "refused this side's certificate");
}

TEST_F(Https, WithCertificatesOfMonitorsPagesMayBeBeyondLoopback) {
  options_.http->listen.host = "0.0.0.0";
  options_.http->tls = *net::Tls::server(tls_.asking_server());
  const auto open = Agent::start(options_);
  ASSERT_FALSE(open) << "everybody could see them";
  EXPECT_EQ(open.error().code(), Errc::unauthenticated);
  options_.http->client_certificates = true;
  start_agent();
  EXPECT_TRUE(get("/healthz", tls_.client("prometheus"), "127.0.0.1"));
}

TEST_F(Https, CertificatesOfMonitorsNeedACa) {
  options_.http->tls = *net::Tls::server(tls_.server());
  options_.http->client_certificates = true;
  const auto agent = Agent::start(options_);
  ASSERT_FALSE(agent);
  EXPECT_EQ(agent.error().code(), Errc::invalid_argument);
  EXPECT_THAT(agent.error().message(), HasSubstr("--tls-ca"));
}

TEST_F(Https, WhoSpeaksHttpIsToldSoInHttp) {
  start_with(tls_.server());
  const std::string answer = raw("GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n");
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 400") << answer;
  EXPECT_THAT(answer, HasSubstr("HTTPS only"));
  expect_refused(TlsOptions(), Errc::protocol, "HTTP status 400: this port speaks HTTPS only");
}

TEST_F(Https, WhoSpeaksHttpsAtAPlainPortIsToldSo) {
  start_agent();
  expect_refused(tls_.client(), Errc::unsupported, "speaks without TLS");
}

TEST_F(Https, AnOlderTlsIsRefused) {
  start_with(tls_.server());
  // A ClientHello of TLS 1.2, no more: version 3.3, and no extension that names 1.3.
  const std::string body = std::string("\x03\x03") + std::string(32, 'r') + std::string("\0\0\x02\xc0\x2b\x01\0", 7);
  const std::string hello = std::string("\x01\0\0", 3) + static_cast<char>(body.size()) + body;
  const std::string record = std::string("\x16\x03\x01\0", 4) + static_cast<char>(hello.size()) + hello;
  const std::string answer = raw(record);
  EXPECT_EQ(answer.substr(0, 1), "\x15") << "an alert";
  EXPECT_THAT(answer, ::testing::Not(HasSubstr("HTTP")));
}

/// Of a handshake: what a peer says, and then nothing more.
class HalfAHandshake : public Https, public ::testing::WithParamInterface<std::string> {};

TEST_P(HalfAHandshake, HoldsNoPlaceAgainstAProbe) {
  options_.http->connections_max = 8;
  options_.http->request = std::chrono::hours(1);
  start_with(tls_.server());
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 64; ++i) {
    silent.push_back(dial());
    ASSERT_EQ(::send(silent.back().get(), GetParam().data(), GetParam().size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(GetParam().size()));
  }
  const auto page = get("/healthz", tls_.client());
  EXPECT_TRUE(page) << page.error().to_string();
}

TEST_P(HalfAHandshake, IsDropped) {
  options_.http->request = std::chrono::milliseconds(100);
  start_with(tls_.server());
  EXPECT_EQ(raw(GetParam()), "");  // returns once the agent has closed
}

INSTANTIATE_TEST_SUITE_P(Tls, HalfAHandshake, ::testing::Values(std::string(), std::string("\x16\x03\x01", 3)),
                         [](const auto& said) { return said.param.empty() ? "Nothing" : "ThreeBytes"; });

TEST_F(Https, WhereToAskIsTakenFromTheAddress) {
  const TlsOptions none;
  const TlsOptions tls = tls_.client();
  EXPECT_FALSE(tools::parse_http_source("127.0.0.1:80", none)->tls.wanted());
  EXPECT_TRUE(tools::parse_http_source("127.0.0.1:80", tls)->tls.wanted());
  EXPECT_TRUE(tools::parse_http_source("https://agent.example:80/", tls)->tls.wanted());
  EXPECT_TRUE(tools::parse_http_source("HTTPS://agent.example:80/", tls)->tls.wanted());
  EXPECT_FALSE(tools::parse_http_source("http://127.0.0.1:80/", none)->tls.wanted());
  EXPECT_EQ(tools::parse_http_source("https://[::1]:80/", tls)->endpoint, (net::Endpoint{"::1", 80}));
  for (const char* wrong :
       {"https://", "https://x", "ftp://x:1", "x", "http://127.0.0.1:80", "https://x:1/v1/status"}) {
    const auto source = tools::parse_http_source(wrong, tls);
    ASSERT_FALSE(source) << wrong;
    EXPECT_EQ(source.error().code(), Errc::invalid_argument);
  }
  TlsOptions only_name;
  only_name.name = "agent.example";
  EXPECT_FALSE(tools::parse_http_source("http://127.0.0.1:80", only_name));
  const auto with_page = tools::parse_http_source("http://127.0.0.1:80/v1/status", none);
  ASSERT_FALSE(with_page);
  EXPECT_THAT(with_page.error().message(), HasSubstr("give HOST:PORT alone"));
  const auto untrusting = tools::parse_http_source("https://agent.example:80", none);
  ASSERT_FALSE(untrusting);
  EXPECT_THAT(untrusting.error().message(), HasSubstr("--tls-ca"));
}

}  // namespace
}  // namespace deltasync::agent
