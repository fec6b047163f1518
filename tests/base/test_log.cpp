// A value in a log line stays in its field, and the line on its line, whatever a peer has sent.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "base/log.hpp"

namespace deltasync {
namespace {

class LogTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { init_log("test", "info"); }
  /// What `say` has written to stderr.
  template <class Say>
  std::string written(Say&& say) {
    testing::internal::CaptureStderr();
    say();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, ValuesAreEscaped) {
  const std::string name = "x\" evil=\"1\\\n2026 error forged\x1b[2J\xC2\x9B\xFF";
  const std::string out =
      written([&] { log::warn("peer_left name=\"{}\" n={} took={:.1f} ok={}", name, 7, 0.25, true); });
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1) << out;
  EXPECT_NE(out.find(R"(peer_left name="x\" evil=\"1\\\x0a2026 error forged\x1b[2J\xc2\x9b\xff" n=7 took=0.2 ok=true)"),
            std::string::npos)
      << out;
}

TEST_F(LogTest, PlainValuesAreAsTheyAre) {
  const std::string out = written([] {
    const char* const reason = "caf\xC3\xA9";
    log::info("event reason=\"{}\" view={} many={}", reason, std::string_view("v"), std::uint64_t{1} << 63);
    log::debug("not taken {}", 1);
  });
  EXPECT_NE(out.find("event reason=\"caf\xC3\xA9\" view=v many=9223372036854775808\n"), std::string::npos) << out;
  EXPECT_EQ(out.find("not taken"), std::string::npos);
}

TEST_F(LogTest, LevelsAreNamedAsTheOptionNamesThem) {
  const auto level = [&](const std::string& out) {
    const auto at = out.find(' ');
    return out.substr(at + 1, out.find(' ', at + 1) - at - 1);
  };
  EXPECT_EQ(level(written([] { log::info("event"); })), "info");
  EXPECT_EQ(level(written([] { log::warn("event"); })), "warn");
  EXPECT_EQ(level(written([] { log::error("event"); })), "error");
}

}  // namespace
}  // namespace deltasync
