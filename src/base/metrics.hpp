// What a process counts and measures, for Prometheus: thin names over prometheus-cpp's core, and what every process of
// deltasync says of itself. In a library of its own (deltasync_metrics): only programs that serve pages link it.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace deltasync::metrics {

/// Only grows. Any thread, without a lock. Lives in its registry.
class Counter {
 public:
  explicit Counter(prometheus::Counter& in_registry) : counter_(&in_registry) {}
  void add(double n = 1) { counter_->Increment(n); }
  double value() const { return counter_->Value(); }
  /// Of those that count whole things.
  std::uint64_t load() const { return static_cast<std::uint64_t>(value()); }
  operator std::uint64_t() const { return load(); }  // NOLINT(google-explicit-constructor): as an atomic is read

 private:
  prometheus::Counter* counter_;
};

/// How long something took, in seconds, in buckets from a millisecond to an hour. Any thread.
class Durations {
 public:
  explicit Durations(prometheus::Histogram& in_registry) : histogram_(&in_registry) {}
  void observe(double seconds) { histogram_->Observe(seconds); }
  std::uint64_t count() const { return histogram_->Collect().histogram.sample_count; }

 private:
  prometheus::Histogram* histogram_;
};

using Labels = std::vector<std::pair<std::string, std::string>>;

/// Makes what a process counts. All names begin with `deltasync_`.
class Registry {
 public:
  Counter counter(const char* name, const char* help, const Labels& labels = {});
  Durations durations(const char* name, const char* help);
  std::vector<prometheus::MetricFamily> collect() const { return registry_.Collect(); }

 private:
  prometheus::Registry registry_;
};

/// Figures that are taken when somebody asks for the page.
class Gauges {
 public:
  /// One without labels.
  void add(const char* name, const char* help, double value);
  /// The beginning of a family, to which sample() adds.
  void family(const char* name, const char* help);
  void sample(double value, const Labels& labels);
  std::vector<prometheus::MetricFamily> take() { return std::move(families_); }

 private:
  std::vector<prometheus::MetricFamily> families_;
};

/// deltasync_build_info, and CPU time, memory, descriptors, threads and start of this process, by the names that other
/// programs have for them.
std::vector<prometheus::MetricFamily> of_process();

/// A page in Prometheus' text format, and what it is called over HTTP.
inline constexpr const char* kContentType = "text/plain; version=0.0.4; charset=utf-8";
std::string to_text(const std::vector<std::vector<prometheus::MetricFamily>>& parts);

}  // namespace deltasync::metrics
