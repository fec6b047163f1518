#include <gtest/gtest.h>

#include <algorithm>

#include "agent/descriptors.hpp"

namespace deltasync::agent {
namespace {

TEST(Descriptors, WhereThereAreEnoughNothingChanges) {
  AgentOptions options;
  const std::uint64_t needed = descriptors_needed(options);
  EXPECT_GE(needed, 2 * options.pull.limits.admission.receivers_max);
  ASSERT_TRUE(fit_connections(needed, true, options));
  EXPECT_EQ(options.pull.limits.admission.receivers_max, AdmissionLimits().receivers_max);
}

TEST(Descriptors, WhereThereAreFewFewerConnectionsAreLetIn) {
  for (const std::uint64_t few : {16u, 256u, 1024u, 4096u}) {
    AgentOptions options;
    ASSERT_TRUE(fit_connections(few, false, options));
    const AdmissionLimits& limits = options.pull.limits.admission;
    EXPECT_GE(limits.receivers_max, 1u);
    EXPECT_GE(limits.strangers_max, 1u);
    const std::uint64_t peers = limits.receivers_max + limits.data_max + 2 * limits.strangers_max +
                                4 * options.trainer.connections_max + options.http->connections_max;
    EXPECT_LT(peers, few);
    if (few < 256) continue;
    EXPECT_LE(peers, few - std::min<std::uint64_t>(few / 2, 256)) << "and some are left for the agent itself";
  }
}

TEST(Descriptors, WhoAskedForMoreThanThereAreIsToldTheNumber) {
  AgentOptions options;
  options.pull.limits.admission.receivers_max = options.pull.limits.admission.data_max = 20'000;
  const std::uint64_t needed = descriptors_needed(options);
  const Status fit = fit_connections(needed - 2, true, options);
  ASSERT_FALSE(fit);
  EXPECT_EQ(fit.error().code(), Errc::invalid_argument);
  const std::string& text = fit.error().message();
  EXPECT_NE(text.find("ulimit -n " + std::to_string(needed)), std::string::npos) << text;
  EXPECT_NE(text.find("at most 19999"), std::string::npos) << text;
  EXPECT_EQ(options.pull.limits.admission.receivers_max, 20'000u) << "untouched";
}

}  // namespace
}  // namespace deltasync::agent
