// Receivers of a whole agent over TLS and without: who is let in, and an attacker on the path, who may break pulls but
// never makes a receiver commit what was not published.
#include <gmock/gmock.h>

#include <sys/socket.h>

#include <mutex>
#include <random>

#include "base/deadline.hpp"
#include "net/tls.hpp"
#include "tests/integration/receivers.hpp"
#include "tests/support/attacker.hpp"
#include "tests/support/certificates.hpp"

namespace deltasync::agent {
namespace {

using test::Attacker;
using test::Way;
using ::testing::HasSubstr;

class TlsPull : public ReceiverTest {
 protected:
  void start_with(const TlsOptions& tls) {
    auto made = net::Tls::server(tls);
    ASSERT_TRUE(made) << made.error().to_string();
    options_.pull.tls = *made;
    start_agent();
  }
  static Result<std::unique_ptr<Receiver>> try_connect(std::uint16_t port, const TlsOptions& tls,
                                                       const std::string& token = {}) {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(port);
    options.streams = 2;
    options.tls = tls;
    options.local = false;
    options.token = token;
    return Receiver::connect(options, test_deadline());
  }
  void expect_refused(const TlsOptions& tls, Errc code, const std::string& says) const {
    const auto receiver = try_connect(port(), tls);
    ASSERT_FALSE(receiver);
    EXPECT_EQ(receiver.error().code(), code) << receiver.error().to_string();
    EXPECT_THAT(receiver.error().message(), HasSubstr(says));
  }

  const test::TestTls tls_{dir_.path()};
};

TEST_F(TlsPull, FullAndDeltaPullsCrossWithCertificatesInPlaceOfAToken) {
  TlsOptions tls = tls_.asking_server();
  tls.allow = {"rollout"};
  options_.pull.listen.host = "0.0.0.0";  // beyond loopback: certificates say who may connect
  start_with(tls);
  writer_ = attach(model_.layout);
  next_version();
  auto receiver = try_connect(port(), tls_.client("rollout"));
  ASSERT_TRUE(receiver) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target(model_.layout), test_deadline()));
  EXPECT_EQ(pull(**receiver).mode, PullMode::full);
  EXPECT_TRUE(held(**receiver) == model_.half);
  next_version();
  EXPECT_EQ(pull(**receiver).mode, PullMode::delta);
  EXPECT_TRUE(held(**receiver) == model_.half);

  expect_refused(tls_.client(), Errc::unauthenticated, "give --tls-cert and --tls-key");
  expect_refused(tls_.client("somebody"), Errc::unauthenticated, "--tls-allow");
}

TEST_F(TlsPull, ABindBeyondLoopbackNeedsMoreThanAnEncryptedPort) {
  auto tls = net::Tls::server(tls_.server());
  options_.pull.tls = *tls;
  options_.pull.listen.host = "0.0.0.0";
  const auto agent = Agent::start(options_);
  ASSERT_FALSE(agent);
  EXPECT_EQ(agent.error().code(), Errc::unauthenticated);
  EXPECT_THAT(agent.error().message(), HasSubstr("--tls-ca"));
}

TEST_F(TlsPull, WhoSpeaksWithoutTlsIsToldSo) {
  options_.pull.limits.handshake = std::chrono::seconds(1);
  start_with(tls_.server());
  expect_refused(TlsOptions(), Errc::unsupported, "speaks TLS only");
}

TEST_F(TlsPull, WhoSpeaksTlsWithAPlainAgentIsToldSo) {
  start_agent();
  expect_refused(tls_.client(), Errc::unsupported, "speaks without TLS");
}

TEST_F(TlsPull, ATokenIsWantedInsideToo) {
  options_.pull.token = "open sesame, but longer";
  start_with(tls_.server());
  expect_refused(tls_.client(), Errc::unauthenticated, "token");
  writer_ = attach(model_.layout);
  next_version();
  const auto receiver = try_connect(port(), tls_.client(), options_.pull.token);
  EXPECT_TRUE(receiver) << receiver.error().to_string();
}

TEST_F(TlsPull, ARecordedTokenHandshakeCannotBePlayedAgain) {
  options_.pull.token = "open sesame, but longer";
  start_agent();
  writer_ = attach(model_.layout);
  next_version();
  std::mutex mutex;
  std::vector<Attacker::Bytes> said;
  {
    Attacker attacker(port(), [&](Way way, std::size_t nth, Attacker::Bytes chunk) {
      const std::lock_guard lock(mutex);
      if (way == Way::to_server && nth == 0) said.push_back(chunk);
      return std::optional(std::vector<Attacker::Bytes>{std::move(chunk)});
    });
    ASSERT_TRUE(try_connect(attacker.port(), TlsOptions(), options_.pull.token));
  }
  ASSERT_FALSE(said.empty());
  auto raw = Client::connect_raw(port());
  ASSERT_TRUE(raw);
  ASSERT_EQ(::send(raw->socket.fd(), said[0].data(), said[0].size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(said[0].size()));
  const auto answer = raw->socket.recv_answer(0, wire::Type::welcome, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::unauthenticated) << answer.error().to_string();
}

/// Changes one chunk in about eight, until he has done so many deeds.
class Villain {
 public:
  Villain(unsigned seed, unsigned deeds) : random_(seed), left_(deeds) {}

  std::optional<std::vector<Attacker::Bytes>> handle(Attacker::Bytes chunk) {
    const std::lock_guard lock(mutex_);
    if (left_ == 0 || random_() % 8 != 0) {
      if (kept_.empty() || random_() % 8 == 0) kept_ = chunk;
      return std::vector<Attacker::Bytes>{std::move(chunk)};
    }
    --left_;
    switch (random_() % 6) {
      case 0: chunk[random_() % chunk.size()] ^= std::byte{1}; break;
      case 1: return std::vector<Attacker::Bytes>{};                         // left out
      case 2: return std::vector<Attacker::Bytes>{chunk, chunk};             // twice
      case 3: return std::vector<Attacker::Bytes>{kept_, std::move(chunk)};  // an earlier one again
      case 4: chunk.resize(chunk.size() / 2); break;                         // cut short
      default: return std::nullopt;                                          // the end
    }
    return std::vector<Attacker::Bytes>{std::move(chunk)};
  }
  bool done() {
    const std::lock_guard lock(mutex_);
    return left_ == 0;
  }

 private:
  std::mutex mutex_;
  std::mt19937 random_;
  unsigned left_;
  Attacker::Bytes kept_;  // of any connection
};

class AttackedPull : public TlsPull, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) {
      start_with(tls_.server());
    } else {
      start_agent();
    }
    writer_ = attach(model_.layout);
    next_version();
  }
  TlsOptions tls() const { return GetParam() ? tls_.client() : TlsOptions(); }
};

TEST_P(AttackedPull, NothingIsCommittedThatWasNotPublishedAndOnceHeIsGonePullsEnd) {
  receiver::Tuning tuning;
  tuning.silence = std::chrono::milliseconds(200);  // what was left out is not waited for long
  tuning.handshake = std::chrono::milliseconds(500);
  for (unsigned seed = 1; seed <= 3; ++seed) {
    Villain villain(seed, 12);
    Attacker attacker(port(),
                      [&](Way, std::size_t, Attacker::Bytes chunk) { return villain.handle(std::move(chunk)); });
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(attacker.port());
    options.streams = 2;
    options.tls = tls();
    options.local = false;
    const Deadline limit = test_deadline();
    std::unique_ptr<Receiver> receiver;
    bool pulled = false;
    while (!(pulled && villain.done()) && !limit.passed()) {
      if (!receiver) {
        auto connected = receiver::ReceiverImpl::connect(options, tuning, Deadline::after(std::chrono::seconds(2)));
        if (!connected) continue;
        receiver = std::move(*connected);
        ASSERT_EQ(receiver->layout()->digest(), model_.layout->digest());
        ASSERT_TRUE(receiver->bind(make_host_target(receiver->layout()), test_deadline()));
      }
      Want want;
      auto staged = receiver->pull(want, Deadline::after(std::chrono::seconds(2)));
      if (!staged || !(*staged)->commit()) continue;  // broken, and said so
      EXPECT_EQ(receiver->current()->id, served()->version.id) << "seed " << seed;
      ASSERT_TRUE(held(*receiver) == model_.half) << "seed " << seed;
      pulled = (*staged)->report().mode != PullMode::up_to_date || pulled;
      if (!villain.done()) next_version();
    }
    EXPECT_TRUE(pulled && villain.done()) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Tls, AttackedPull, ::testing::Bool(),
                         [](const auto& with) { return with.param ? "With" : "Without"; });

}  // namespace
}  // namespace deltasync::agent
