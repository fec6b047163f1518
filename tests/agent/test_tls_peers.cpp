// Receivers whose CA is taken out of the agent's file while they are connected.
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "net/tls.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/certificates.hpp"

namespace deltasync::agent {
namespace {

class TlsPeersOfAnAgent : public AgentTest {
 protected:
  /// The CAs in the agent's file from now on.
  void trust(const std::vector<std::filesystem::path>& cas) const {
    const std::filesystem::path next = server_.ca.string() + ".next";
    {
      std::ofstream out(next);
      for (const auto& ca : cas) out << std::ifstream(ca).rdbuf();
    }
    std::filesystem::rename(next, server_.ca);
  }
  /// Authenticated: the agent waits for a request.
  Result<net::MessageSocket> enter(const test::TestCa& ca, const std::string& name) const {
    TlsOptions options = with(tls_.client(), ca.issue(name, test::named(name)));
    options.ca = kept_;
    DS_ASSIGN(const auto tls, net::Tls::client(options));
    DS_ASSIGN(UniqueFd fd, net::connect_tcp("127.0.0.1", port(), test_deadline()));
    net::MessageSocket socket(std::move(fd));
    DS_ASSIGN(auto channel, tls->channel(socket.fd(), "127.0.0.1"));
    DS_TRY(socket.secure(std::move(channel), test_deadline()));
    DS_TRY(socket.recv_as<wire::Hello>(wire::kHelloRequest, test_deadline()));
    wire::Auth auth;
    auth.role = wire::Role::control;
    auth.nonce = net::make_nonce();
    auth.name = name;
    DS_TRY(socket.send(0, auth, test_deadline()));
    DS_TRY(socket.recv_as<wire::Welcome>(0, test_deadline()));
    return socket;
  }

  const test::TestTls tls_{dir_.path()};
  const TlsOptions server_ = tls_.asking_server();
  const std::filesystem::path kept_ = dir_.path() / "kept.pem";  ///< a copy of the CA's
};

TEST_F(TlsPeersOfAnAgent, WhoseCaIsTakenOutAreDisconnectedAndOthersStay) {
  const test::TestCa other(dir_.path(), "other");
  std::filesystem::copy_file(server_.ca, kept_);
  trust({kept_, other.file()});
  options_.pull.tls = *net::Tls::server(server_);
  start_agent();
  auto stays = enter(tls_.ca, "stays");
  ASSERT_TRUE(stays) << stays.error().to_string();
  auto leaves = enter(other, "leaves");
  ASSERT_TRUE(leaves) << leaves.error().to_string();
  EXPECT_EQ(agent_->pull_server().connections(), 2u);

  trust({kept_});
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 1; }));
  EXPECT_TRUE(eventually([&] { return leaves->peer_closed(); }));
  const auto again = enter(other, "leaves");
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code(), Errc::unauthenticated) << again.error().to_string();

  ASSERT_TRUE(stays->send(wire::Type::get_layout, 1, {}, test_deadline()));
  const auto answer = stays->recv_as<wire::LayoutMessage>(1, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::not_found) << answer.error().to_string();
}

/// Its certificate alone is renewed.
TEST_F(TlsPeersOfAnAgent, AllStayWhereTheCaStays) {
  std::filesystem::copy_file(server_.ca, kept_);
  options_.pull.tls = *net::Tls::server(server_);
  start_agent();
  auto stays = enter(tls_.ca, "stays");
  ASSERT_TRUE(stays) << stays.error().to_string();
  const auto end = options_.pull.tls->certificates_end();
  test::Wanted renewed = test::local_server();
  renewed.to *= 2;
  static_cast<void>(tls_.asking_server(renewed));
  ASSERT_TRUE(eventually([&] { return options_.pull.tls->certificates_end() != end; }));
  ASSERT_TRUE(stays->send(wire::Type::get_layout, 1, {}, test_deadline()));
  EXPECT_EQ(stays->recv_as<wire::LayoutMessage>(1, test_deadline()).error().code(), Errc::not_found);
}

}  // namespace
}  // namespace deltasync::agent
