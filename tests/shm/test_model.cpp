// The protocol, explored: every interleaving of the configurations below, as it is and with one guard removed.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "shm/explorer.hpp"

namespace deltasync::shm::model {
namespace {

WriterScript writer(unsigned slot, unsigned writers, std::uint64_t epoch, unsigned versions, bool granted = true) {
  return {slot, writers, epoch, versions, granted};
}

/// One writer, three versions, a reader: the ordinary life, with deadlines, aborts and a kill anywhere.
Config one_writer() {
  Config c;
  c.name = "one writer, agent killed and restarted";
  c.writers = {writer(0, 1, 1, 3)};
  c.kills = 1, c.agent_restarts = 1, c.aborts = 1, c.timeouts = 1;
  return c;
}

void report(const Config& config, const Outcome& out, double seconds) {
  std::printf("  %-52s %9llu states %10llu steps %7llu quiet %6llu complete  %5.1f s  %s\n", config.name,
              static_cast<unsigned long long>(out.states), static_cast<unsigned long long>(out.steps),
              static_cast<unsigned long long>(out.quiet), static_cast<unsigned long long>(out.completed), seconds,
              name(out.violation));
}

Outcome run(const Config& config, Guard broken = Guard::none) {
  const auto start = std::chrono::steady_clock::now();
  auto out = explore(config, broken);
  report(config, out, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return out;
}

void expect_clean(const Config& config) {
  const auto out = run(config);
  EXPECT_FALSE(out.truncated) << "the bound cut the search: it proves nothing";
  EXPECT_EQ(out.violation, Violation::none) << name(out.violation);
  EXPECT_GT(out.completed, 0u) << "the search never came to an end of the work";
  EXPECT_GT(out.sealed_versions, 0u);
  for (const auto& line : out.trace) std::printf("      %s\n", line.c_str());
}

TEST(Model, OneWriter) {
  expect_clean(one_writer());
}

}  // namespace
}  // namespace deltasync::shm::model
