// Peers that are wrong, hostile or silent.
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include "base/hash.hpp"
#include "base/trace.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

constexpr const char* kToken = "sixteen bytes or more";

class Handshake : public AgentTest {
 protected:
  /// True when the agent closed the connection.
  static bool closed(const net::MessageSocket& socket) {
    return eventually([&] { return socket.peer_closed(); });
  }
  static void send_raw(const net::MessageSocket& socket, ByteSpan bytes) {
    ASSERT_EQ(::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  static wire::Header signed_header(wire::Type type, std::uint64_t payload_bytes) {
    wire::Header header;
    header.type = static_cast<std::uint16_t>(type);
    header.payload_bytes = payload_bytes;
    header.header_hash = xxh3_64(bytes_of(header).first(offsetof(wire::Header, header_hash)));
    return header;
  }
  std::uint64_t failed() const { return agent_->core().metrics().handshakes_failed; }
};

TEST_F(Handshake, WithoutATokenEverybodyIsWelcome) {
  start_agent();
  const auto c = Client::connect(port(), wire::Role::control);
  ASSERT_TRUE(c) << c.error().to_string();
  EXPECT_EQ(c->hello.auth_required, 0);
  EXPECT_EQ(c->welcome.has_layout, 0);
}

TEST_F(Handshake, TheAgentSaysWhatTimeItIsByItsClock) {
  start_agent();
  const std::uint64_t before = trace::now_ns();
  const auto c = Client::connect(port(), wire::Role::control);
  ASSERT_TRUE(c) << c.error().to_string();
  EXPECT_EQ(c->welcome.clock, trace::clock_id());  // the same machine's
  EXPECT_GT(c->welcome.clock_ns, before);
  EXPECT_LT(c->welcome.clock_ns, trace::now_ns());
}

TEST_F(Handshake, TheRightTokenIsWelcomeAndProvedBack) {
  options_.pull.token = "open sesame, all of you";
  start_agent();
  for (const auto role : {wire::Role::control, wire::Role::data, wire::Role::watch}) {
    const auto c = Client::connect(port(), role, "open sesame, all of you");
    ASSERT_TRUE(c) << c.error().to_string();
    EXPECT_EQ(c->hello.auth_required, 1);
  }
}

TEST_F(Handshake, AWrongOrMissingTokenIsToldAndDropped) {
  options_.pull.token = "open sesame, all of you";
  start_agent();
  for (const char* token : {"open sesame, all of yo", "open sesame, all of you ", ""}) {
    auto c = Client::connect(port(), wire::Role::control, token);
    ASSERT_FALSE(c) << "token \"" << token << "\"";
    EXPECT_EQ(c.error().code(), Errc::unauthenticated);
  }
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
  EXPECT_EQ(failed(), 3u);
}

TEST_F(Handshake, ARecordedProofIsWorthNothing) {
  options_.pull.token = kToken;
  start_agent();
  auto first = Client::connect_raw(port());
  auto second = Client::connect_raw(port());
  ASSERT_TRUE(first && second);
  EXPECT_NE(first->hello.nonce, second->hello.nonce);
  wire::Auth auth;
  auth.nonce = net::make_nonce();
  auth.proof = net::client_proof(kToken, first->hello.nonce, auth.nonce, auth.role);
  ASSERT_TRUE(second->socket.send(0, auth, test_deadline()));
  const auto answer = second->socket.recv_as<wire::Welcome>(0, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::unauthenticated);
}

TEST_F(Handshake, AProofForAnotherRoleIsWorthNothing) {
  options_.pull.token = kToken;
  start_agent();
  auto c = Client::connect_raw(port());
  ASSERT_TRUE(c);
  wire::Auth auth;
  auth.role = wire::Role::control;
  auth.nonce = net::make_nonce();
  auth.proof = net::client_proof(kToken, c->hello.nonce, auth.nonce, wire::Role::data);
  ASSERT_TRUE(c->socket.send(0, auth, test_deadline()));
  EXPECT_FALSE(c->socket.recv_as<wire::Welcome>(0, test_deadline()));
}

TEST_F(Handshake, AnotherProtocolIsUnsupported) {
  start_agent();
  auto c = Client::connect_raw(port());
  ASSERT_TRUE(c);
  wire::Auth auth;
  auth.protocol = 99;
  ASSERT_TRUE(c->socket.send(0, auth, test_deadline()));
  const auto answer = c->socket.recv_as<wire::Welcome>(0, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::unsupported);
}

/// A receiver of the release before looks at the payload's number alone, and wants its own there.
TEST_F(Handshake, TheProtocolBeforeIsSpoken) {
  start_agent();
  const auto old = Client::connect(port(), wire::Role::control, {}, wire::kProtocolOldest);
  ASSERT_TRUE(old) << old.error().to_string();
  EXPECT_EQ(old->hello.protocol, wire::kProtocolOldest);
  EXPECT_FALSE(Client::connect(port(), wire::Role::control, {}, wire::kProtocolOldest - 1));
  EXPECT_FALSE(Client::connect(port(), wire::Role::control, {}, wire::kProtocolVersion + 1));
}

TEST_F(Handshake, AnotherProtocolsAuthMayHaveAnyShape) {
  start_agent();
  for (const std::size_t bytes : {std::size_t{2}, std::size_t{1000}}) {
    auto c = Client::connect_raw(port());
    ASSERT_TRUE(c);
    ASSERT_TRUE(c->socket.send(wire::Type::auth, 0, std::vector<std::byte>(bytes, std::byte{9}), test_deadline()));
    const auto answer = c->socket.recv_as<wire::Welcome>(0, test_deadline());
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code(), Errc::unsupported) << answer.error().message();
  }
}

TEST_F(Handshake, GarbageIsDropped) {
  start_agent();
  auto c = Client::connect_raw(port());
  ASSERT_TRUE(c);
  send_raw(c->socket, bytes_of(std::string_view("GET / HTTP/1.1\r\nHost: somewhere.else\r\nAccept: */*\r\n\r\n")));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
  EXPECT_EQ(failed(), 1u);
}

/// A probe that only connects, as Kubernetes' tcpSocket: it tries nothing.
TEST_F(Handshake, APeerThatLeavesWithoutAWordHasNotFailed) {
  start_agent();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Client::connect_raw(port()));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
  EXPECT_EQ(failed(), 0u);
  {
    const auto begun = Client::connect_raw(port());
    ASSERT_TRUE(begun);
    send_raw(begun->socket, bytes_of(std::string_view("D")));
  }
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
  EXPECT_EQ(failed(), 1u);
}

TEST_F(Handshake, ASilentPeerIsDropped) {
  options_.pull.limits.handshake = std::chrono::milliseconds(50);
  start_agent();
  auto c = Client::connect_raw(port());
  ASSERT_TRUE(c);
  const auto message = c->socket.recv(wire::kControlBytesMax, test_deadline());  // the last words
  ASSERT_TRUE(message) << message.error().to_string();
  EXPECT_EQ(message->type(), wire::Type::error);
  EXPECT_TRUE(closed(c->socket));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
}

TEST_F(Handshake, APeerThatStopsInsideItsAuthIsDropped) {
  options_.pull.limits.handshake = std::chrono::milliseconds(500);
  start_agent();
  auto c = Client::connect_raw(port());
  ASSERT_TRUE(c);
  send_raw(c->socket, bytes_of(signed_header(wire::Type::auth, 100)));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
}

TEST_F(Handshake, ALyingLengthIsRefusedBeforeItsBytes) {
  start_agent();
  for (const std::uint64_t bytes : {std::uint64_t{5000}, wire::kControlBytesMax + 1, ~std::uint64_t{0}}) {
    auto c = Client::connect_raw(port());
    ASSERT_TRUE(c);
    send_raw(c->socket, bytes_of(signed_header(wire::Type::auth, bytes)));
    const auto message = c->socket.recv(wire::kControlBytesMax, test_deadline());
    ASSERT_TRUE(message) << message.error().to_string();
    const auto error = wire::ErrorMessage::decode(message->payload);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, Errc::protocol) << error->message;
  }
}

TEST_F(Handshake, AnythingButAuthIsRefused) {
  start_agent();
  auto c = Client::connect_raw(port());
  ASSERT_TRUE(c);
  ASSERT_TRUE(c->socket.send(wire::Type::get_layout, 0, {}, test_deadline()));
  const auto answer = c->socket.recv_as<wire::LayoutMessage>(0, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::protocol);
  EXPECT_TRUE(closed(c->socket));
}

TEST_F(Handshake, RequestsBelongToRoles) {
  start_agent();
  auto data = client(wire::Role::data);
  const auto plan = data.plan(ask());
  ASSERT_FALSE(plan);
  EXPECT_TRUE(closed(data.socket));
  auto watch = client(wire::Role::watch);
  ASSERT_TRUE(watch.socket.send(wire::Type::get_layout, 1, {}, test_deadline()));
  EXPECT_FALSE(watch.socket.recv_as<wire::LayoutMessage>(1, test_deadline()));
  auto control = client();
  ASSERT_TRUE(control.socket.send(wire::Type::hello, 1, wire::Hello().encode(), test_deadline()));
  EXPECT_FALSE(control.socket.recv_as<wire::Hello>(1, test_deadline()));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
}

TEST_F(Handshake, ARequestThatDoesNotDecodeEndsTheConnection) {
  start_agent();
  auto c = client();
  std::vector<std::byte> payload = ask().encode();
  payload.pop_back();
  ASSERT_TRUE(c.socket.send(wire::Type::plan, 1, payload, test_deadline()));
  const auto message = c.socket.recv(wire::kControlBytesMax, test_deadline());
  ASSERT_TRUE(message);
  EXPECT_EQ(message->type(), wire::Type::error);
  EXPECT_TRUE(closed(c.socket));
}

TEST_F(Handshake, AnIdlePeerIsDropped) {
  options_.pull.limits.idle = std::chrono::milliseconds(50);
  start_agent();
  const auto c = client();
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
}

TEST_F(Handshake, ConnectionsAreLimited) {
  options_.pull.limits.admission.receivers_max = 2;
  start_agent();
  const auto a = client();
  const auto b = client(wire::Role::watch);
  for (const auto protocol : {wire::kProtocolVersion, wire::kProtocolOldest}) {
    const auto third = Client::connect(port(), wire::Role::control, {}, protocol);
    ASSERT_FALSE(third);
    EXPECT_EQ(third.error().code(), Errc::connection) << "every receiver knocks again then";
    EXPECT_NE(third.error().message().find("busy: 2 connections of at most 2; try another agent or a relay"),
              std::string::npos)
        << third.error().message();
  }
  EXPECT_EQ(agent_->core().metrics().connections_refused, 2u);
  EXPECT_EQ(failed(), 0u);
  EXPECT_TRUE(Client::connect(port(), wire::Role::data)) << "those who are connected can still pull";
}

/// More of them than there are places for, all silent: a peer that answers gets through, and is not disturbed.
TEST_F(Handshake, AFloodOfSilentPeersLocksNobodyOut) {
  options_.pull.token = kToken;
  options_.pull.limits.handshake = std::chrono::hours(1);  // so that none goes by itself
  options_.pull.limits.admission.strangers_per_loopback = 64;
  start_agent();
  auto known = Client::connect(port(), wire::Role::control, kToken);
  ASSERT_TRUE(known);
  std::vector<Client> flood;
  for (int i = 0; i < 200; ++i) {
    auto silent = Client::connect_raw(port());
    ASSERT_TRUE(silent) << i << ": " << silent.error().to_string();
    flood.push_back(std::move(*silent));
    if (i % 50 != 49) continue;
    const auto newcomer = Client::connect(port(), wire::Role::control, kToken);
    EXPECT_TRUE(newcomer) << i << ": " << newcomer.error().to_string();
  }
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() <= 1u + 64u; }));
  EXPECT_GE(agent_->core().metrics().connections_evicted, 136u);
  EXPECT_TRUE(closed(flood.front().socket)) << "the oldest";
  EXPECT_FALSE(flood.back().socket.peer_closed());
  EXPECT_EQ(known->layout().error().code(), Errc::not_found) << "it is answered";
}

TEST_F(Handshake, AFloodWritesFewLines) {
  options_.pull.token = kToken;
  start_agent();
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::warn);
  ::testing::internal::CaptureStdout();
  for (int i = 0; i < 200; ++i) EXPECT_FALSE(Client::connect(port(), wire::Role::control, "wrong"));
  EXPECT_TRUE(eventually([&] { return failed() == 200; }));
  stop_agent();
  const std::string text = ::testing::internal::GetCapturedStdout();
  spdlog::set_level(level);
  std::size_t lines = 0;
  for (auto at = text.find("peer_dropped"); at != std::string::npos; at = text.find("peer_dropped", at + 1)) ++lines;
  EXPECT_GE(lines, 1u);
  EXPECT_LE(lines, 50u) << text;
}

TEST_F(Handshake, ABindBeyondLoopbackNeedsAToken) {
  options_.pull.listen.host = "0.0.0.0";
  const auto open = Agent::start(options_);
  ASSERT_FALSE(open);
  EXPECT_EQ(open.error().code(), Errc::unauthenticated);
  options_.pull.token = kToken;
  start_agent();
  EXPECT_TRUE(Client::connect(port(), wire::Role::control, kToken));
}

TEST_F(Handshake, ASecondAgentIsRefusedByName) {
  start_agent();
  options_.trainer.socket_path += "2";
  const auto second = Agent::start(options_);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::already_exists);
}

TEST_F(Handshake, StopEndsOpenConversations) {
  start_agent();
  auto idle = client();
  auto waiting = client();
  wire::PlanRequest plan = ask();
  plan.wait_ms = 3'600'000;
  ASSERT_TRUE(waiting.socket.send(1, plan, test_deadline()));
  auto watching = client(wire::Role::watch);
  ASSERT_TRUE(watching.socket.send(wire::Type::watch, 1, {}, test_deadline()));
  stop_agent();
  EXPECT_TRUE(closed(idle.socket));
  EXPECT_TRUE(closed(waiting.socket));
  EXPECT_TRUE(closed(watching.socket));
}

TEST_F(Handshake, AWaitingPeerThatLeavesIsNoticedWhateverItSaidBefore) {
  start_agent();
  auto waiting = client();
  wire::PlanRequest plan = ask();
  plan.wait_ms = 3'600'000;
  ASSERT_TRUE(waiting.socket.send(1, plan, test_deadline()));
  ASSERT_TRUE(waiting.socket.send(2, plan, test_deadline()));  // never read
  waiting.socket.close();
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
}

TEST_F(Handshake, AWatcherThatGoesOnTalkingIsDropped) {
  start_agent();
  auto watching = client(wire::Role::watch);
  ASSERT_TRUE(watching.socket.send(wire::Type::watch, 1, {}, test_deadline()));
  ASSERT_TRUE(watching.socket.send(wire::Type::watch, 2, {}, test_deadline()));
  const auto answer = watching.socket.recv_as<wire::VersionReady>(0, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::protocol);
  EXPECT_TRUE(closed(watching.socket));
}

TEST_F(Handshake, PeersThatJustLeaveAreNoErrors) {
  start_agent();
  static_cast<void>(client());
  static_cast<void>(client(wire::Role::data));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
  EXPECT_EQ(agent_->core().metrics().errors[static_cast<std::size_t>(Errc::connection)], 0u);
}

}  // namespace
}  // namespace deltasync::agent
