#include "base/log_json.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>

namespace deltasync::log {
namespace {

using nlohmann::json;

constexpr std::chrono::system_clock::time_point kNow{std::chrono::milliseconds(1'700'000'000'042)};

template <class... Args>
json line(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = json_line(Level::warn, "deltasync-agent", kNow, format, fmt::make_format_args(args...));
  EXPECT_EQ(text.find('\n'), std::string::npos);
  return json::parse(text);
}

TEST(LogJson, EachKeyIsAField) {
  const std::string name = "rank 2";
  const json said = line("peer_left connection={} name=\"{}\" wait_s={:.2f} mode={} kept=yes", 7u, name, 1.5, "full");
  EXPECT_EQ(said["level"], "warn");
  EXPECT_EQ(said["process"], "deltasync-agent");
  EXPECT_TRUE(said["pid"].is_number());
  EXPECT_EQ(said["event"], "peer_left");
  EXPECT_EQ(said["connection"], 7);
  EXPECT_EQ(said["name"], "rank 2");
  EXPECT_EQ(said["wait_s"], 1.5);
  EXPECT_EQ(said["mode"], "full");
  EXPECT_EQ(said["kept"], "yes");
  EXPECT_FALSE(said.contains("message"));
}

TEST(LogJson, AValueStaysInItsField) {
  const std::string lie = "x\" level=\"error\", \"event\": \"agent_ready\"}\n{\\";
  const json said = line("peer_dropped name=\"{}\" code={}", lie, lie);
  EXPECT_EQ(said["name"], lie);
  EXPECT_EQ(said["code"], lie) << "a blank in a value ends nothing";
  EXPECT_EQ(said["level"], "warn");
  EXPECT_EQ(said["event"], "peer_dropped");
}

TEST(LogJson, WhatIsNotUtf8DoesNotBreakTheLine) {
  EXPECT_EQ(line("e name={}", std::string("a\xFF\x01")), line("e name={}", std::string("a?\x01")));
  EXPECT_EQ(line("e name={}", std::string("ä"))["name"], "ä");
}

TEST(LogJson, TextThatLooksLikeANumberIsText) {
  const json said = line("e root={} digits={:04} plain={}", std::string("00123"), 7, std::string("12"));
  EXPECT_EQ(said["root"], "00123");
  EXPECT_EQ(said["digits"], "0007") << "no number of JSON";
  EXPECT_EQ(said["plain"], "12");
}

TEST(LogJson, WordsBesideTheKeys) {
  const std::string late = " error=\"gone\"";
  const json said = line("segment_removed name={} reason=\"a newer layout is {{served}}\"{}", std::string("g1"), late);
  EXPECT_EQ(said["reason"], "a newer layout is {served}");
  EXPECT_EQ(said["message"], late);
  EXPECT_EQ(line("{}", std::string("signal number=15"))["event"], "signal number=15");
  EXPECT_EQ(line("receiver does_not why={}", 3)["message"], "does_not");
}

TEST(LogJson, TimeHasItsZone) {
  const char* const before = std::getenv("TZ");
  const std::string kept = before != nullptr ? before : "";
  ::setenv("TZ", "<-0330>3:30", 1);
  ::tzset();
  EXPECT_EQ(local_time(kNow), "2023-11-14T18:43:20.042-03:30");
  ::setenv("TZ", "UTC", 1);
  ::tzset();
  EXPECT_EQ(local_time(kNow), "2023-11-14T22:13:20.042+00:00");
  EXPECT_EQ(line("e")["time"], "2023-11-14T22:13:20.042+00:00");
  if (before != nullptr)
    ::setenv("TZ", kept.c_str(), 1);
  else
    ::unsetenv("TZ");
  ::tzset();
}

}  // namespace
}  // namespace deltasync::log
