#include "base/metrics.hpp"

#include <gtest/gtest.h>

#include <ctime>
#include <string>
#include <thread>
#include <vector>

namespace deltasync::metrics {
namespace {

/// The value of the one line that begins with `name` and a space.
double value_of(const std::string& text, const std::string& name) {
  const auto at = ("\n" + text).find("\n" + name + " ");
  EXPECT_NE(at, std::string::npos) << name << " in\n" << text;
  return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 1));
}

TEST(Metrics, CountersOfOneNameAreOneFamily) {
  Registry registry;
  Counter full = registry.counter("pulls_total", "Pulls.", {{"mode", "full"}});
  Counter delta = registry.counter("pulls_total", "Pulls.", {{"mode", "delta"}});
  full.add(2);
  delta.add();
  const std::string text = to_text({registry.collect()});
  EXPECT_EQ(value_of(text, "deltasync_pulls_total{mode=\"full\"}"), 2);
  EXPECT_EQ(value_of(text, "deltasync_pulls_total{mode=\"delta\"}"), 1);
  EXPECT_EQ(text.find("# TYPE"), text.rfind("# TYPE")) << text;
}

TEST(Metrics, CountersLoseNothingBetweenThreads) {
  Registry registry;
  Counter counter = registry.counter("bytes_total", "Bytes.");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([counter]() mutable {
      for (int n = 0; n < 10'000; ++n) counter.add(3);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter.load(), 120'000u);
}

TEST(Metrics, DurationsAreCumulativeBuckets) {
  Registry registry;
  Durations durations = registry.durations("pull_duration_seconds", "Pulls.");
  durations.observe(0.002);
  durations.observe(0.2);
  const std::string text = to_text({registry.collect()});
  EXPECT_EQ(value_of(text, "deltasync_pull_duration_seconds_bucket{le=\"0.001\"}"), 0);
  EXPECT_EQ(value_of(text, "deltasync_pull_duration_seconds_bucket{le=\"0.0025\"}"), 1);
  EXPECT_EQ(value_of(text, "deltasync_pull_duration_seconds_bucket{le=\"0.25\"}"), 2);
  EXPECT_NEAR(value_of(text, "deltasync_pull_duration_seconds_sum"), 0.202, 1e-9);
  EXPECT_EQ(durations.count(), 2u);
}

TEST(Metrics, LabelsAreEscaped) {
  Gauges gauges;
  gauges.family("receiver_versions_behind", "Versions.");
  gauges.sample(3, {{"receiver", "a \"b\"\\\nc"}});
  EXPECT_EQ(value_of(to_text({gauges.take()}), "deltasync_receiver_versions_behind{receiver=\"a \\\"b\\\"\\\\\\nc\"}"),
            3);
}

TEST(Metrics, OfTheProcess) {
  const std::string text = to_text({of_process()});
  EXPECT_NE(text.find("deltasync_build_info{version=\"" DELTASYNC_VERSION "\""), std::string::npos) << text;
  EXPECT_GT(value_of(text, "process_resident_memory_bytes"), 1e6);
  EXPECT_GT(value_of(text, "process_virtual_memory_bytes"), value_of(text, "process_resident_memory_bytes"));
#ifdef DELTASYNC_SANITIZED
  EXPECT_GE(value_of(text, "process_heap_bytes"), 0);  // the sanitizer's allocator does not count
#else
  const double heap = value_of(text, "process_heap_bytes");
  const std::vector<char> more(100'000, 'x');
  EXPECT_GE(value_of(to_text({of_process()}), "process_heap_bytes"), heap + 90'000) << more.back();
#endif
  EXPECT_GE(value_of(text, "process_cpu_seconds_total"), 0);
  EXPECT_GE(value_of(text, "process_open_fds"), 3);
  EXPECT_GT(value_of(text, "process_max_fds"), value_of(text, "process_open_fds"));
  EXPECT_GE(value_of(text, "process_threads"), 1);
  const double now = static_cast<double>(std::time(nullptr));
  EXPECT_LE(value_of(text, "process_start_time_seconds"), now + 2);
  EXPECT_GT(value_of(text, "process_start_time_seconds"), now - 3600);
}

}  // namespace
}  // namespace deltasync::metrics
