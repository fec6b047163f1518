// A coordinator that speaks TLS, and ranks that do or do not.
#include <gmock/gmock.h>

#include "commit/rank_link.hpp"
#include "tests/commit/server_fixture.hpp"
#include "tests/support/certificates.hpp"

namespace deltasync::commit {
namespace {

using ::testing::HasSubstr;

class CommitTls : public CommitServer {
 protected:
  CommitTls() {
    options_.ranks = 2;
    options_.log = dir_.path() / "commit.log";
    options_.tls = tls_.asking_server();
  }
  void start_with_tls() {
    auto made = CoordinatorServer::start(options_);
    ASSERT_TRUE(made) << made.error().to_string();
    server_ = *std::move(made);
  }
  Result<Order> exchange(const TlsOptions& tls) const {
    ParticipantOptions options;
    options.ranks = 2;
    DS_ASSIGN(auto client, net::Tls::client_if_wanted(tls));
    RankLink link(options, {"127.0.0.1", server_->port()}, std::move(client));
    return link.exchange(busy(1, 1000), soon(), {});
  }

  const test::TestTls tls_{dir_.path()};
  CoordinatorOptions options_;
};

TEST_F(CommitTls, RanksWithACertificateNeedNoTokenBeyondLoopback) {
  options_.listen = "0.0.0.0:0";
  start_with_tls();
  const auto order = exchange(tls_.client("rank"));
  ASSERT_TRUE(order) << order.error().to_string();
  EXPECT_EQ(order->kind, OrderKind::none);
  EXPECT_TRUE(eventually([&] { return server_->ranks().at(1).report.has_value(); }));
}

TEST_F(CommitTls, AnEncryptedPortAloneIsNotEnoughBeyondLoopback) {
  options_.listen = "0.0.0.0:0";
  options_.tls.ca.clear();
  const auto made = CoordinatorServer::start(options_);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::unauthenticated);
}

TEST_F(CommitTls, RanksWithoutTheRightCertificateAreToldWhy) {
  options_.tls.allow = {"rank"};
  start_with_tls();
  const auto nobody = exchange(tls_.client());
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code(), Errc::unauthenticated) << nobody.error().to_string();
  const auto other = exchange(tls_.client("other"));
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message(), HasSubstr("--tls-allow"));
  const auto plain = exchange(TlsOptions());
  ASSERT_FALSE(plain);
  EXPECT_EQ(plain.error().code(), Errc::unsupported) << plain.error().to_string();
  EXPECT_THAT(plain.error().message(), HasSubstr("speaks TLS only"));
  EXPECT_TRUE(exchange(tls_.client("rank")));
}

}  // namespace
}  // namespace deltasync::commit
