// What a browser asks for other sites' pages is told from what this host's programs ask.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "receiver/control/browsers.hpp"

namespace deltasync::control {
namespace {

using Headers = std::vector<std::pair<std::string_view, std::string_view>>;

std::string foreign(const Headers& headers, bool tls = false, std::string_view listen = "127.0.0.1") {
  return foreign_page({.method = "POST", .target = "/pause", .body = {}, .headers = headers}, listen, tls);
}

TEST(ForeignPages, ProgramsOfThisHostAreNone) {
  for (const std::string_view host : {"127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "127.9.9.9"}) {
    EXPECT_EQ(foreign({{"Host", host}}), "") << host;
  }
  EXPECT_EQ(foreign({{"host", "engine0:8000"}}, false, "Engine0"), "");
  EXPECT_EQ(foreign({{"Host", "engine0.cluster:8000"}}, true), "");
}

TEST(ForeignPages, AReboundNameIsOne) {
  for (const std::string_view host : {"site.example:8000", "127.0.0.1.site.example", "localhost.site.example", "",
                                      "10.0.0.7:8000", "[", ":", "127.0.0.1@site.example"}) {
    EXPECT_NE(foreign({{"Host", host}}), "") << host;
  }
  EXPECT_NE(foreign({}), "");
}

TEST(ForeignPages, AnotherOriginIsOne) {
  const auto from = [](std::string_view origin, bool tls = false) {
    return foreign({{"Host", "localhost:8000"}, {"origin", origin}}, tls);
  };
  EXPECT_EQ(from("http://localhost:8000"), "");
  EXPECT_EQ(from("https://localhost:8000", true), "");
  for (const std::string_view origin : {"null", "http://site.example", "http://localhost:3000",
                                        "https://localhost:8000", "http://localhost:8000.site.example"}) {
    EXPECT_NE(from(origin), "") << origin;
  }
}

TEST(ForeignPages, ALinkIsOne) {
  const auto by = [](std::string_view site) { return foreign({{"Host", "localhost"}, {"Sec-Fetch-Site", site}}); };
  EXPECT_EQ(by("none"), "");
  EXPECT_EQ(by("same-origin"), "");
  EXPECT_NE(by("same-site"), "");
  EXPECT_NE(by("cross-site"), "");
}

}  // namespace
}  // namespace deltasync::control
