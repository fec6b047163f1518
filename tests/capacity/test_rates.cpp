#include "capacity/rates.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

namespace deltasync::capacity {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Rates, OfBenchmarks) {
  Rates rates = builtin_rates();
  EXPECT_THAT(rates.assumed, ElementsAre("e2e", "full", "relay"));
  // 2 GiB, 1 % of 2^30 parameters.
  ASSERT_TRUE(add_benchmarks(rates, R"(a line of a log
{"case": "e2e", "model_gib": 2, "threads": 4, "density": 0.01, "offload_s": 0.5, "commit_to_delta_s": 0.25,
 "this is": "no line by itself"}
{"case": "full", "model_gib": 2, "threads": 16, "streams": 4, "limit_gbps": 4, "pull_gbps": 2}
{"case": "gpu", "model_gib": 2}
)",
                             "b.json"));
  EXPECT_THAT(rates.assumed, ElementsAre("e2e", "relay"));
  ASSERT_TRUE(add_benchmarks(rates, R"({"case": "e2e", "model_gib": 0.001, "total_s": 0.004})", "b.json"));
  EXPECT_EQ(rates.pull_s, 0.004);
  EXPECT_THAT(rates.assumed, ElementsAre("e2e", "relay"));  // what each kind of work costs
  EXPECT_DOUBLE_EQ(rates.send_s, 1e-9);                     // eight cores, half of them send
  EXPECT_DOUBLE_EQ(rates.receive_s, 3e-9);                  // and of 4 core-seconds for a GB the rest
  ASSERT_TRUE(
      add_benchmarks(rates,
                     "{\"case\": \"e2e\", \"model_gib\": 2, \"threads\": 4, \"density\": 0.01, \"offload_s\": 0.5, "
                     "\"commit_to_delta_s\": 0.25, \"pull_s\": 0.2, \"commit_s\": 0.3, \"wire_bytes\": 13421773, "
                     "\"total_s\": 1}\n"
                     "{\"case\": \"relay\", \"model_gib\": 2, \"threads\": 2, \"relay_commit_s\": 1, "
                     "\"node_diff_s\": 0.5}\n"
                     "{\"case\": \"e2e\", \"model_gib\": 0.001, \"density\": 0.01, \"total_s\": 0.006}\n",
                     "b.json"));
  EXPECT_THAT(rates.assumed, ElementsAre());
  EXPECT_DOUBLE_EQ(rates.offload_s, 0.5 * 4 / 0x1p31);
  EXPECT_DOUBLE_EQ(rates.diff_s, 0.25 * 4 / 0x1p31);
  EXPECT_DOUBLE_EQ(rates.verify_s, 0.2 * 4 / (0.01 * 0x1p30));
  EXPECT_DOUBLE_EQ(rates.commit_s, 0.3 * 4 / (0.01 * 0x1p30));
  EXPECT_DOUBLE_EQ(rates.relay_commit_s, 2 / 0x1p31);
  EXPECT_DOUBLE_EQ(rates.relay_diff_s, 1 / 0x1p31);
  EXPECT_NEAR(rates.bits_per_change, 10, 1e-6);
  EXPECT_EQ(rates.pull_s, 0.006);
}

TEST(Rates, WhatIsNone) {
  Rates rates = builtin_rates();
  const Status none = add_benchmarks(rates, "no JSON\n{\"case\": \"gpu\"}\n[1]\n{\"case\": 1}\n", "b.json");
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message(), HasSubstr("b.json: no line of a benchmark that counts here"));
  for (const char* line : {R"({"case": "relay", "model_gib": 2, "threads": 2, "relay_commit_s": 0.5})",
                           R"({"case": "relay", "model_gib": 2, "threads": 2, "relay_commit_s": 0, "node_diff_s": 1})",
                           R"({"case": "e2e", "model_gib": 2, "density": "x", "wire_bytes": 1})"}) {
    const Status wrong = add_benchmarks(rates, line, "b.json");
    ASSERT_FALSE(wrong) << line;
    EXPECT_EQ(wrong.error().code(), Errc::invalid_argument);
    EXPECT_THAT(wrong.error().message(), HasSubstr("run it again with this release and --json"));
  }
}

}  // namespace
}  // namespace deltasync::capacity
