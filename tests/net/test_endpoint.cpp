#include <gtest/gtest.h>

#include "net/endpoint.hpp"

namespace deltasync::net {
namespace {

TEST(Endpoint, GoodOnes) {
  const struct {
    const char* text;
    const char* host;
    std::uint16_t port;
  } cases[] = {
      {"127.0.0.1:80", "127.0.0.1", 80}, {"host.example:65535", "host.example", 65535}, {"localhost:0", "localhost", 0},
      {"[::1]:7070", "::1", 7070},       {"[fe80::1%eth0]:1", "fe80::1%eth0", 1},
  };
  for (const auto& c : cases) {
    const auto endpoint = parse_endpoint(c.text);
    ASSERT_TRUE(endpoint) << c.text << " " << endpoint.error().to_string();
    EXPECT_EQ(endpoint->host, c.host);
    EXPECT_EQ(endpoint->port, c.port);
    EXPECT_EQ(to_string(*endpoint), c.text);
  }
}

TEST(Endpoint, BadOnesAreNamed) {
  for (const char* text : {"", "host", ":80", "host:", "host:65536", "host:-1", "host: 80", "host:80x", "::1:80",
                           "[::1]", "[::1]80", "[::1:80", "[]:80", "[host]:80", "a:b:80"}) {
    const auto endpoint = parse_endpoint(text);
    ASSERT_FALSE(endpoint) << text;
    EXPECT_EQ(endpoint.error().code(), Errc::invalid_argument) << text;
    EXPECT_NE(endpoint.error().message().find("\"" + std::string(text) + "\""), std::string::npos) << text;
  }
  EXPECT_FALSE(parse_endpoint(std::string(300, 'a') + ":80"));
}

TEST(Endpoint, Loopback) {
  for (const char* host : {"localhost", "127.0.0.1", "127.255.0.9", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(is_loopback(host)) << host;
  }
  for (const char* host :
       {"0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "::2", "::ffff:10.0.0.1", "localhost.evil", "127.0.0.1.evil", ""}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

}  // namespace
}  // namespace deltasync::net
