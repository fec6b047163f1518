// TLS channels between two ends, blocking and coroutine: who is let in, who is told what, and what an attacker between
// them can do. Files that change are read again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>

#include <array>
#include <csignal>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

#include "base/deadline.hpp"
#include "net/blocking.hpp"
#include "net/listener.hpp"
#include "net/message_stream.hpp"
#include "net/tls.hpp"
#include "tests/support/attacker.hpp"
#include "tests/support/certificates.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::net {
namespace {

using test::Attacker;
using test::local_server;
using test::named;
using test::Way;
using test::with;
using ::testing::HasSubstr;
namespace asio = boost::asio;

constexpr auto kLong = std::chrono::seconds(60);  ///< never reached by a test that passes

Deadline later() {
  return Deadline::after(kLong);
}

/// What came of both ends' handshake, and of one message each way.
struct Meeting {
  Status server;
  Status client;
};

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() { std::signal(SIGPIPE, SIG_IGN); }

  /// One client's end: dials `port`, and asks for an answer.
  static Status ask(Tls* tls, std::uint16_t port, const std::string& host) {
    DS_ASSIGN(UniqueFd fd, connect_tcp("127.0.0.1", port, later()));
    MessageSocket socket(std::move(fd));
    if (tls != nullptr) {
      DS_ASSIGN(auto channel, tls->channel(socket.fd(), host));
      DS_TRY(socket.secure(std::move(channel), later()));
    }
    std::vector<std::byte> question(100'000, std::byte{3});
    DS_TRY(socket.send(wire::Type::plan, 7, question, later()));
    DS_ASSIGN(const Message answer, socket.recv_answer(7, wire::Type::plan_reply, later()));
    return answer.payload == question ? Status() : Error(Errc::corrupt, "another answer");
  }
  /// One server's end: answers with the same bytes; a peer that began without TLS is told so.
  static Status answer(Tls* tls, Listener& listener, Deadline handshake = later()) {
    DS_ASSIGN(UniqueFd fd, listener.accept(later()));
    MessageSocket socket(std::move(fd));
    if (tls != nullptr) {
      DS_ASSIGN(auto channel, tls->channel(socket.fd(), "the client"));
      if (auto secured = socket.secure(std::move(channel), handshake); !secured) {
        if (socket.open()) {
          wire::ErrorMessage words;
          words.code = secured.error().code();
          words.message = secured.error().message();
          static_cast<void>(socket.send(0, words, later()));
          socket.end_sending();
        }
        return secured;
      }
    }
    DS_ASSIGN(const Message asked, socket.recv(wire::kControlBytesMax, later()));
    DS_TRY(socket.send(wire::Type::plan_reply, asked.header.request, asked.payload, later()));
    // Until the peer is gone, so that nothing that it has not read is thrown away.
    const auto after = socket.recv(wire::kControlBytesMax, later());
    return after || after.error().code() != Errc::connection ? Error(Errc::internal, "the peer said more") : Status();
  }

  static Meeting meet(Tls* server, Tls* client, const std::string& host = "localhost") {
    Listener listener = *Listener::bind({"127.0.0.1", 0}, false);
    auto served = std::async(std::launch::async, [&] { return answer(server, listener); });
    Meeting meeting;
    meeting.client = ask(client, listener.port(), host);
    meeting.server = served.get();
    return meeting;
  }
  static Meeting meet(const TlsOptions& server, const TlsOptions& client, const std::string& host = "localhost") {
    const auto s = Tls::server(server);
    const auto c = Tls::client(client);
    if (!s || !c) return {s ? Status() : Status(s.error()), c ? Status() : Status(c.error())};
    return meet(s->get(), c->get(), host);
  }

  static void expect_refused(const Status& status, Errc code, const std::string& says) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code(), code) << status.error().to_string();
    EXPECT_THAT(status.error().message(), HasSubstr(says));
  }

  test::TempDir dir_;
  const test::TestTls tls_{dir_.path()};
};

TEST_F(TlsTest, MessagesCrossBetweenNamedEnds) {
  for (const char* host : {"localhost", "127.0.0.1", "agent.example"}) {
    const Meeting meeting = meet(tls_.server(), tls_.client(), host);
    EXPECT_TRUE(meeting.client) << meeting.client.error().to_string();
    EXPECT_TRUE(meeting.server) << meeting.server.error().to_string();
  }
}

TEST_F(TlsTest, AServerOfAnotherNameIsRefused) {
  expect_refused(meet(tls_.server(), tls_.client(), "other.example").client, Errc::unauthenticated,
                 "for localhost, agent.example, 127.0.0.1, not for other.example");
  expect_refused(meet(tls_.server(), tls_.client(), "127.0.0.2").client, Errc::unauthenticated, "--tls-name");
  TlsOptions other_name = tls_.client();
  other_name.name = "agent.example";
  EXPECT_TRUE(meet(tls_.server(), other_name, "other.example").client);
  // The common name is no name of a server.
  expect_refused(meet(tls_.server(named("localhost")), tls_.client()).client, Errc::unauthenticated,
                 "not for localhost");
}

TEST_F(TlsTest, AnExpiredCertificateIsRefusedByItsDate) {
  // The server read it while it was good.
  test::Wanted soon = local_server();
  soon.to = std::chrono::seconds(5);
  const auto server = Tls::server(tls_.server(soon));
  ASSERT_TRUE(server);
  std::this_thread::sleep_for(std::chrono::seconds(6));
  const auto client = Tls::client(tls_.client());
  expect_refused(meet(server->get(), client->get()).client, Errc::unauthenticated, "its certificate expired on 20");
  // And does not begin with one that is past.
  test::Wanted past = local_server();
  past.to = std::chrono::seconds(-60);
  expect_refused(Tls::server(tls_.server(past)).ok() ? Status() : Status(Tls::server(tls_.server(past)).error()),
                 Errc::invalid_argument, "server.pem: it expired on 20");
}

TEST_F(TlsTest, ACertificateOfTheFutureIsRefusedByItsDate) {
  test::Wanted future = local_server();
  future.from = std::chrono::hours(48);
  future.to = std::chrono::hours(96);
  expect_refused(meet(tls_.server(future), tls_.client()).client, Errc::unauthenticated, "is not valid before 20");
}

TEST_F(TlsTest, OnlyTheNamedCaSigns) {
  const test::TestCa other(dir_.path(), "other");
  TlsOptions trusting_another = tls_.client();
  trusting_another.ca = other.file();
  expect_refused(meet(tls_.server(), trusting_another).client, Errc::unauthenticated, "is not signed by a CA in");
  // Who sends its CA along is told of that one.
  TlsOptions whole = tls_.server();
  std::ostringstream chain;
  chain << std::ifstream(whole.cert).rdbuf() << std::ifstream(tls_.client().ca).rdbuf();
  dir_.write("chain.pem", std::string_view(chain.view()));
  whole.cert = dir_.path() / "chain.pem";
  const Status above = meet(whole, trusting_another).client;
  expect_refused(above, Errc::unauthenticated, "its CA's certificate (");
  expect_refused(above, Errc::unauthenticated, ") is not signed by a CA in");
  TlsOptions self = tls_.server();
  self = with(self, test::TestCa::self_signed(dir_.path(), "self", local_server()));
  expect_refused(meet(self, tls_.client()).client, Errc::unauthenticated, "but by itself");
}

TEST_F(TlsTest, AServerWithACaLetsInWhomItSigned) {
  TlsOptions server = tls_.asking_server();
  const Meeting none = meet(server, tls_.client());
  expect_refused(none.server, Errc::unauthenticated, "the peer has no certificate");
  expect_refused(none.client, Errc::unauthenticated, "give --tls-cert and --tls-key");

  EXPECT_TRUE(meet(server, tls_.client("rollout-a")).client);

  const test::TestCa other(dir_.path(), "other");
  const Meeting strange = meet(server, with(tls_.client(), other.issue("b", named("rollout-a"))));
  expect_refused(strange.server, Errc::unauthenticated, "is not signed by a CA in");
  expect_refused(strange.client, Errc::unauthenticated, "the peer refused this side's certificate");

  test::Wanted past = named("rollout-a");
  const auto files = tls_.ca.issue("past", past);
  auto client = Tls::client(with(tls_.client(), files));
  ASSERT_TRUE(client);
}

TEST_F(TlsTest, AServerLetsInOnlyNamesOnItsList) {
  TlsOptions server = tls_.asking_server();
  server.allow = {"rollout-a", "rollout-b.example"};
  EXPECT_TRUE(meet(server, tls_.client("Rollout-A")).client);
  test::Wanted by_dns = named("anyone");
  by_dns.dns = {"x.example", "rollout-b.example"};
  EXPECT_TRUE(meet(server, with(tls_.client(), tls_.ca.issue("b", by_dns))).client);
  const Meeting other = meet(server, tls_.client("rollout-c"));
  expect_refused(other.server, Errc::unauthenticated, "is for rollout-c, whom --tls-allow does not name");
  expect_refused(other.client, Errc::unauthenticated, "--tls-allow");
}

TEST_F(TlsTest, OptionsThatWouldDoNothingAreRefused) {
  const auto refused = [](const auto& made, const std::string& option) {
    ASSERT_FALSE(made) << option;
    expect_refused(Status(made.error()), Errc::invalid_argument, option + " needs --tls-ca");
  };
  TlsOptions options;
  options.name = "agent.example";
  refused(Tls::client_if_wanted(options), "--tls-name");
  options = {};
  options.allow = {"rollout-a"};
  refused(Tls::client_if_wanted(options), "--tls-allow");
  refused(Tls::server_if_wanted(options), "--tls-allow");
  options = tls_.server();
  refused(Tls::client_if_wanted(options), "--tls-cert");
  options.allow = {"rollout-a"};
  refused(Tls::server_if_wanted(options), "--tls-allow");
  EXPECT_EQ(*Tls::client_if_wanted({}), nullptr);
  EXPECT_EQ(*Tls::server_if_wanted({}), nullptr);
}

TEST_F(TlsTest, WrongFilesAreNamed) {
  const auto refused = [&](const TlsOptions& options, Errc code, const std::string& says) {
    const auto made = Tls::server(options);
    expect_refused(made ? Status() : Status(made.error()), code, says);
  };
  TlsOptions options = tls_.server();
  options.cert = dir_.path() / "nowhere.pem";
  refused(options, Errc::not_found, "nowhere.pem");
  options = tls_.server();
  options.key = tls_.ca.issue("another", local_server()).key;
  refused(options, Errc::invalid_argument, "another.key: not the key of the certificate in");
  options = tls_.server();
  std::filesystem::permissions(options.key, std::filesystem::perms::others_read, std::filesystem::perm_options::add);
  refused(options, Errc::permission, "make it mode 0600");
  dir_.write("junk.pem", std::string_view("not a certificate\n"));
  options = tls_.server();
  options.cert = dir_.path() / "junk.pem";
  refused(options, Errc::invalid_argument, "junk.pem: no certificate in PEM form");
  options = tls_.server();
  options.allow = {"somebody"};
  refused(options, Errc::invalid_argument, "--tls-ca");
  options = TlsOptions();
  options.ca = tls_.ca.file();
  refused(options, Errc::invalid_argument, "--tls-cert");
  options = TlsOptions();
  options.cert = tls_.server().cert;
  const auto client = Tls::client(options);
  ASSERT_FALSE(client);
  EXPECT_THAT(client.error().message(), HasSubstr("--tls-ca"));
}

TEST_F(TlsTest, APeerWithoutTlsIsToldAndDoesNotWait) {
  const auto server = *Tls::server(tls_.server());
  // It says nothing first, as receivers do: half of the handshake's time is waited for it.
  Listener listener = *Listener::bind({"127.0.0.1", 0}, false);
  auto served = std::async(std::launch::async,
                           [&] { return answer(server.get(), listener, Deadline::after(std::chrono::seconds(3))); });
  MessageSocket silent(*connect_tcp("127.0.0.1", listener.port(), later()));
  const auto said = silent.recv_answer(0, wire::Type::hello, later());
  expect_refused(said ? Status() : Status(said.error()), Errc::unsupported, "speaks TLS only");
  expect_refused(served.get(), Errc::unsupported, "began without");
  // It speaks first.
  expect_refused(meet(server.get(), nullptr).client, Errc::unsupported, "speaks TLS only");
  // And the other way round: a server that speaks first, without TLS.
  const auto client = *Tls::client(tls_.client());
  served = std::async(std::launch::async, [&]() -> Status {
    DS_ASSIGN(UniqueFd fd, listener.accept(later()));
    MessageSocket socket(std::move(fd));
    DS_TRY(socket.send(0, wire::Hello(), later()));
    const auto heard = socket.recv(wire::kControlBytesMax, later());
    return heard ? Status() : Status(heard.error());
  });
  expect_refused(ask(client.get(), listener.port(), "localhost"), Errc::unsupported, "speaks without TLS");
  expect_refused(served.get(), Errc::unsupported, "the peer speaks TLS");
}

TEST_F(TlsTest, FilesThatChangeAreReadAgain) {
  test::Wanted first = local_server();
  first.dns = {"first.example"};
  const TlsOptions options = tls_.server(first);
  const auto server = *Tls::server(options);
  const auto client = *Tls::client(tls_.client());
  EXPECT_TRUE(meet(server.get(), client.get(), "first.example").client);

  // What cannot be used leaves what was read in use.
  const auto key = std::filesystem::path(options.key.string() + ".kept");
  std::filesystem::copy_file(options.key, key);
  { std::ofstream(options.key, std::ios::trunc) << "broken\n"; }
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_TRUE(meet(server.get(), client.get(), "first.example").client);

  test::Wanted second = local_server();
  second.dns = {"second.example"};
  tls_.server(second);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  const Meeting renewed = meet(server.get(), client.get(), "second.example");
  EXPECT_TRUE(renewed.client) << renewed.client.error().to_string();
  EXPECT_FALSE(meet(server.get(), client.get(), "first.example").client);
}

/// The files are as they were when they could not be read.
TEST_F(TlsTest, WhatCouldNotBeReadIsTriedAgain) {
  test::Wanted first = local_server();
  first.dns = {"first.example"};
  const auto server = *Tls::server(tls_.server(first));
  const auto client = *Tls::client(tls_.client());
  test::Wanted second = local_server();
  second.dns = {"second.example"};
  tls_.server(second);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto unread = server->channel(STDIN_FILENO, "a peer");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(unread) << unread.error().to_string();
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_TRUE(meet(server.get(), client.get(), "second.example").client);
}

// ---- an attacker on the path ---------------------------------------------------------------------------------------

std::vector<Attacker::Bytes> one(Attacker::Bytes bytes) {
  return {std::move(bytes)};
}

/// A deed done once in a connection, to the nth chunk of a direction; what comes before and after passes.
Attacker::Deed at(Way way, std::size_t nth,
                  std::function<std::optional<std::vector<Attacker::Bytes>>(Attacker::Bytes)> deed) {
  return [=](Way this_way, std::size_t n, Attacker::Bytes chunk) -> std::optional<std::vector<Attacker::Bytes>> {
    if (this_way == way && n == nth) return deed(std::move(chunk));
    return one(std::move(chunk));
  };
}

class AttackedTest : public TlsTest {
 protected:
  /// A question and its answer over the attacker's path. Both ends come to an end, whatever it does.
  Meeting meet_over(const Attacker::Deed& deed, bool with_tls) {
    const auto server = *Tls::server(tls_.server());
    const auto client = *Tls::client(tls_.client());
    Listener listener = *Listener::bind({"127.0.0.1", 0}, false);
    Meeting meeting;
    auto served = std::async(std::launch::async, [&] { return answer(with_tls ? server.get() : nullptr, listener); });
    {
      Attacker attacker(listener.port(), deed);
      meeting.client = ask(with_tls ? client.get() : nullptr, attacker.port(), "localhost");
    }
    meeting.server = served.get();
    return meeting;
  }
};

TEST_F(AttackedTest, AnHonestPathIsNoAttack) {
  EXPECT_TRUE(meet_over(Attacker::honest(), true).client);
  EXPECT_TRUE(meet_over(Attacker::honest(), false).client);
}

TEST_F(AttackedTest, EveryChangedByteEndsInAnError) {
  // In the hellos, in the handshake and in what follows it, on both ways.
  for (const Way way : {Way::to_server, Way::to_client}) {
    for (const std::size_t nth : {0, 1, 2, 4}) {
      for (const std::size_t byte : {5u, 12u, 60u}) {
        bool done = false;
        const Meeting meeting = meet_over(at(way, nth,
                                             [&](Attacker::Bytes chunk) {
                                               if (byte < chunk.size()) {
                                                 chunk[byte] ^= std::byte{0x40};
                                                 done = true;
                                               }
                                               return one(std::move(chunk));
                                             }),
                                          true);
        if (!done) continue;
        EXPECT_FALSE(meeting.client.ok() && meeting.server.ok())
            << "way " << static_cast<int>(way) << " chunk " << nth << " byte " << byte;
        if (way == Way::to_client) {
          EXPECT_FALSE(meeting.client) << "chunk " << nth << " byte " << byte;
        }
      }
    }
  }
}

TEST_F(AttackedTest, WhatIsLeftOutRepeatedOrReorderedIsFound) {
  const auto changed = [](const Status& status) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code(), Errc::corrupt) << status.error().to_string();
  };
  // The answer of 100,000 bytes crosses in chunks of records: the fourth is far behind the handshake.
  const auto left_out = at(Way::to_client, 4, [](const Attacker::Bytes&) { return std::vector<Attacker::Bytes>(); });
  EXPECT_FALSE(meet_over(left_out, true).client);
  const auto twice = [&](std::size_t nth) {
    return at(Way::to_client, nth, [](Attacker::Bytes chunk) { return std::vector<Attacker::Bytes>{chunk, chunk}; });
  };
  EXPECT_FALSE(meet_over(twice(2), true).client);
  // Whole records, cut where they begin: nothing but their place is wrong.
  const auto by_records = [](auto&& deed) {
    return [deed, rest = std::make_shared<Attacker::Bytes>(), seen = std::make_shared<std::size_t>(0)](
               Way way, std::size_t, Attacker::Bytes chunk) -> std::optional<std::vector<Attacker::Bytes>> {
      if (way == Way::to_server) return one(std::move(chunk));
      rest->insert(rest->end(), chunk.begin(), chunk.end());
      std::vector<Attacker::Bytes> out;
      while (rest->size() >= 5) {
        const std::size_t length =
            5 + (std::to_integer<std::size_t>((*rest)[3]) << 8) + std::to_integer<std::size_t>((*rest)[4]);
        if (rest->size() < length) break;
        Attacker::Bytes record(rest->begin(), rest->begin() + static_cast<std::ptrdiff_t>(length));
        rest->erase(rest->begin(), rest->begin() + static_cast<std::ptrdiff_t>(length));
        deed((*seen)++, std::move(record), out);
      }
      return out;
    };
  };
  const auto pass =
      by_records([](std::size_t, Attacker::Bytes record, auto& out) { out.push_back(std::move(record)); });
  EXPECT_TRUE(meet_over(pass, true).client);
  constexpr std::size_t kFirst = 6;  // hello, cipher change, four of the handshake; then the answer
  const auto drop = by_records([](std::size_t nth, Attacker::Bytes record, auto& out) {
    if (nth != kFirst + 1) out.push_back(std::move(record));
  });
  changed(meet_over(drop, true).client);
  const auto repeat = by_records([](std::size_t nth, Attacker::Bytes record, auto& out) {
    if (nth == kFirst + 1) out.push_back(record);
    out.push_back(std::move(record));
  });
  changed(meet_over(repeat, true).client);
  const auto swap =
      by_records([held = std::make_shared<Attacker::Bytes>()](std::size_t nth, Attacker::Bytes record, auto& out) {
        if (nth == kFirst + 1) {
          *held = std::move(record);
          return;
        }
        out.push_back(std::move(record));
        if (nth == kFirst + 2) out.push_back(std::move(*held));
      });
  changed(meet_over(swap, true).client);
}

TEST_F(AttackedTest, ACutConnectionIsNoEnd) {
  const Meeting cut = meet_over(at(Way::to_client, 4, [](const Attacker::Bytes&) { return std::nullopt; }), true);
  expect_refused(cut.client, Errc::connection, "cut");
}

TEST_F(AttackedTest, ARecordedConversationCannotBePlayedAgain) {
  auto record = std::make_shared<std::vector<Attacker::Bytes>>();
  auto mutex = std::make_shared<std::mutex>();
  const auto listening = [=](Way way, std::size_t,
                             Attacker::Bytes chunk) -> std::optional<std::vector<Attacker::Bytes>> {
    const std::lock_guard lock(*mutex);
    if (way == Way::to_server) record->push_back(chunk);
    return one(std::move(chunk));
  };
  ASSERT_TRUE(meet_over(listening, true).client);
  const auto server = *Tls::server(tls_.server());
  Listener listener = *Listener::bind({"127.0.0.1", 0}, false);
  auto served = std::async(std::launch::async, [&] { return answer(server.get(), listener); });
  const UniqueFd fd = *connect_tcp("127.0.0.1", listener.port(), later());
  for (const auto& chunk : *record) static_cast<void>(::send(fd.get(), chunk.data(), chunk.size(), MSG_NOSIGNAL));
  expect_refused(served.get(), Errc::corrupt, "");
}

// ---- coroutines ----------------------------------------------------------------------------------------------------

class TlsStreamTest : public TlsTest {
 protected:
  TlsStreamTest() : thread_([this] { io_.run(); }) {}
  ~TlsStreamTest() override {
    work_.reset();
    io_.stop();
    thread_.join();
  }
  template <class T>
  std::future<T> start(asio::awaitable<T> work) {
    auto promise = std::make_shared<std::promise<T>>();
    auto future = promise->get_future();
    asio::co_spawn(stream_->executor(), deliver(std::move(work), std::move(promise)), asio::detached);
    return future;
  }
  template <class T>
  static asio::awaitable<void> deliver(asio::awaitable<T> work, std::shared_ptr<std::promise<T>> promise) {
    promise->set_value(co_await std::move(work));
  }
  /// Both ends, past the handshake.
  void connect() {
    Listener listener = *Listener::bind({"127.0.0.1", 0}, false);
    peer_ = MessageSocket(*connect_tcp("127.0.0.1", listener.port(), later()));
    MessageStream::Socket socket(asio::make_strand(io_));
    socket.assign(asio::generic::stream_protocol(AF_INET, IPPROTO_TCP), listener.accept(later())->release());
    stream_.emplace(std::move(socket));
    server_ = *Tls::server(tls_.server());
    client_ = *Tls::client(tls_.client());
    auto secured = start(stream_->secure(std::move(*server_->channel(stream_->fd(), "peer")), later()));
    ASSERT_TRUE(peer_.secure(std::move(*client_->channel(peer_.fd(), "localhost")), later()));
    ASSERT_TRUE(secured.get());
  }

  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  std::shared_ptr<Tls> server_;
  std::shared_ptr<Tls> client_;
  std::optional<MessageStream> stream_;
  MessageSocket peer_;
  std::thread thread_;
};

TEST_F(TlsStreamTest, MessagesOfAnySizeCrossBothWays) {
  connect();
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{16'384}, std::size_t{16'385}, std::size_t{5} << 20}) {
    std::vector<std::byte> payload(bytes);
    for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::byte>(i * 7 + (i >> 14));
    auto read = start(stream_->read(wire::kFrameBytesMax, later(), kLong));
    ASSERT_TRUE(peer_.send(wire::Type::frame, 42, payload, later()));
    const auto message = read.get();
    ASSERT_TRUE(message) << message.error().to_string();
    EXPECT_TRUE(message->payload == payload);
    auto write = start(stream_->write(wire::Type::frame, 43, payload, kLong));
    const auto answer = peer_.recv(wire::kFrameBytesMax, later());
    ASSERT_TRUE(answer) << answer.error().to_string();
    EXPECT_TRUE(answer->payload == payload);
    ASSERT_TRUE(write.get());
  }
  EXPECT_EQ(stream_->bytes_received(), peer_.bytes_sent());
  EXPECT_EQ(stream_->bytes_sent(), peer_.bytes_received());
}

struct Permit final : MessageStream::MaySend {
  std::atomic<bool> may{true};
  bool may_send() const override { return may; }
};

TEST_F(TlsStreamTest, AFileCrossesAndARevocationStopsIt) {
  connect();
  constexpr std::size_t kBytes = 20'000'003;
  std::vector<std::byte> bytes(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i * 31 + (i >> 16));
  const UniqueFd file(::memfd_create("tls-test", MFD_CLOEXEC));
  ASSERT_EQ(::write(file.get(), bytes.data(), kBytes), static_cast<ssize_t>(kBytes));
  Permit permit;
  std::uint64_t sent = 0;
  auto sending = start(stream_->send_file(file.get(), 7, kBytes - 7, permit, kLong, &sent));
  std::vector<std::byte> got(kBytes - 7);
  ASSERT_TRUE(peer_.recv_payload(got, later()));
  ASSERT_TRUE(sending.get());
  EXPECT_EQ(sent, kBytes - 7);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), bytes.begin() + 7));

  // A peer that does not read: what it is sent stands still until the permit is withdrawn.
  sending = start(stream_->send_file(file.get(), 0, kBytes, permit, kLong, &sent));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  permit.may = false;
  stream_->canceller().cancel();
  const Status ended = sending.get();
  ASSERT_FALSE(ended);
  EXPECT_EQ(ended.error().code(), Errc::lease_revoked);
}

}  // namespace
}  // namespace deltasync::net
