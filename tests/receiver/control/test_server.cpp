// The service over HTTP, where it matters on which thread its calls go on.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "receiver/control/server.hpp"
#include "tests/receiver/control/fake_engine.hpp"

namespace deltasync::control {
namespace {

/// The answer's status line and headers, and its body.
std::string ask(const std::string& endpoint, const std::string& method, const std::string& target,
                const std::string& headers = "") {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1))));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0) {
    const std::string request =
        method + " " + target + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers + "\r\n";
    EXPECT_EQ(::send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
    char buffer[4096];
    for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) {
      answer.append(buffer, static_cast<std::size_t>(got));
    }
  }
  ::close(fd);
  return answer;
}

struct Served {
  test::Notes notes;
  test::FakeEngine engine{notes};
  test::FakeWeights* weights = new test::FakeWeights(notes);  // the server's
  std::unique_ptr<StoppableServer> server =
      *start_server({.model = "tiny"}, engine, std::unique_ptr<EngineWeights>(weights));
};

TEST(ControlServerDeathTest, AHookThatDestroysItIsNamed) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto destroy = [] {
    Served served;
    served.notes.at("stop_admission", [&] { served.server.reset(); });
    ask(served.server->endpoint(), "POST", "/v1/pause");
  };
  EXPECT_DEATH(destroy(), "destroyed in a hook of its engine");
}

TEST(ControlServer, RequestsAreForVersions) {
  Served served;
  const std::string at = served.server->endpoint();
  EXPECT_NE(ask(at, "GET", "/is_paused", "x-deltasync-min-version: 1\r\n").find("200 OK"), std::string::npos);
  served.notes.take();
  for (const char* header : {"X-Deltasync-Min-Version: 2\r\n", "X-Deltasync-Exact-Version: other\r\n"}) {
    const std::string refused = ask(at, "POST", "/v1/pause", header);
    EXPECT_NE(refused.find(" 409 "), std::string::npos) << refused;
    EXPECT_NE(refused.find("X-Deltasync-Version: 1\r\n"), std::string::npos) << refused;
  }
  EXPECT_EQ(served.notes.take(), std::vector<std::string>());
  EXPECT_NE(ask(at, "GET", "/is_paused", "X-Deltasync-Min-Version: new\r\n").find(" 400 "), std::string::npos);
  ask(at, "POST", "/update_weight_version", "Content-Length: 22\r\n\r\n{\"new_version\": \"one\"}");
  const auto admitted = served.server->admit("1", "one");
  ASSERT_TRUE(admitted);
  EXPECT_EQ(admitted->first.label, "one");
  EXPECT_EQ(admitted->second, "0000000000000009:1");
  EXPECT_EQ(served.server->admit("2", "").error().code(), Errc::version_conflict);
}

TEST(ControlServer, WhatIsSaidOfTheEngineIsAnObject) {
  test::Notes notes;
  test::FakeEngine engine{notes};
  for (const char* text : {"[1]", "{", "null"}) {
    const auto server = start_server({.engine_info = text}, engine, std::make_unique<test::FakeWeights>(notes));
    EXPECT_EQ(server.error().code(), Errc::invalid_argument) << text;
  }
  const auto server = *start_server({.engine_info = R"({"a": 1})"}, engine, std::make_unique<test::FakeWeights>(notes));
  EXPECT_NE(ask(server->endpoint(), "GET", "/server_info").find("\"a\":1"), std::string::npos);
}

TEST(ControlServer, KnowsItsHooks) {
  Served served;
  bool inside = false;
  served.notes.at("stop_admission", [&] { inside = served.server->in_hook(); });
  EXPECT_NE(ask(served.server->endpoint(), "POST", "/v1/pause").find("200 OK"), std::string::npos);
  EXPECT_TRUE(inside);
  ask(served.server->endpoint(), "POST", "/v1/resume");
  inside = false;
  served.weights->become_void();
  ASSERT_TRUE(served.server->check());
  EXPECT_TRUE(inside);
  EXPECT_FALSE(served.server->in_hook());
}

TEST(ControlServer, TheLiveVersionIsAskedForInItsCalls) {
  Served served;
  std::atomic<int> outside = 0;
  served.weights->when_asked = [&] { outside += served.server->in_hook() ? 0 : 1; };
  EXPECT_NE(ask(served.server->endpoint(), "GET", "/is_paused", "x-deltasync-min-version: 1\r\n").find("200 OK"),
            std::string::npos);
  EXPECT_EQ(outside, 0);
}

}  // namespace
}  // namespace deltasync::control
