#include "base/metrics.hpp"

#include <dirent.h>
#include <malloc.h>
#include <prometheus/text_serializer.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

namespace deltasync::metrics {
namespace {

/// Seconds: an offload of a small model takes milliseconds, a full pull of a large one over a slow link an hour.
const prometheus::Histogram::BucketBoundaries kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                                          1,     2.5,    5,     10,   30,    60,   300, 1800, 3600};

std::string full_name(const char* name) {
  return std::string("deltasync_") + name;
}

std::map<std::string, std::string> as_map(const Labels& labels) {
  return {labels.begin(), labels.end()};
}

prometheus::MetricFamily single(std::string name, std::string help, prometheus::MetricType type, double value,
                                const Labels& labels = {}) {
  prometheus::MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = type;
  prometheus::ClientMetric& metric = family.metric.emplace_back();
  for (const auto& [label, text] : labels) metric.label.push_back({label, text});
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return family;
}

/// The fields of /proc/self/stat after the command's name; empty if it cannot be read.
std::vector<std::string> process_stat() {
  std::ifstream in("/proc/self/stat");
  std::string line;
  std::getline(in, line);
  const auto end_of_name = line.rfind(')');
  std::vector<std::string> fields;
  if (end_of_name == std::string::npos) return fields;
  std::istringstream rest(line.substr(end_of_name + 1));
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

/// When the system started, in seconds since 1970; 0 if that is not known.
double boot_time_s() {
  std::ifstream in("/proc/stat");
  for (std::string word; in >> word;) {
    double seconds = 0;
    if (word == "btime" && in >> seconds) return seconds;
  }
  return 0;
}

double open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir("/proc/self/fd"), [](DIR* d) { return ::closedir(d); });
  if (!dir) return 0;
  double count = -3;  // ".", ".." and the directory itself
  while (::readdir(dir.get()) != nullptr) ++count;
  return count;
}

}  // namespace

Counter Registry::counter(const char* name, const char* help, const Labels& labels) {
  auto& family = prometheus::BuildCounter().Name(full_name(name)).Help(help).Register(registry_);
  return Counter(family.Add(as_map(labels)));
}

Durations Registry::durations(const char* name, const char* help) {
  auto& family = prometheus::BuildHistogram().Name(full_name(name)).Help(help).Register(registry_);
  return Durations(family.Add({}, kSeconds));
}

void Gauges::add(const char* name, const char* help, double value) {
  families_.push_back(single(full_name(name), help, prometheus::MetricType::Gauge, value));
}

void Gauges::family(const char* name, const char* help) {
  prometheus::MetricFamily& family = families_.emplace_back();
  family.name = full_name(name);
  family.help = help;
  family.type = prometheus::MetricType::Gauge;
}

void Gauges::sample(double value, const Labels& labels) {
  prometheus::ClientMetric& metric = families_.back().metric.emplace_back();
  for (const auto& [label, text] : labels) metric.label.push_back({label, text});
  metric.gauge.value = value;
}

std::vector<prometheus::MetricFamily> of_process() {
  using prometheus::MetricType;
  std::vector<prometheus::MetricFamily> families;
  families.push_back(single("deltasync_build_info", "Always 1; what this program was built from.", MetricType::Gauge, 1,
                            {{"version", DELTASYNC_VERSION}, {"compiler", __VERSION__}}));
  timespec cpu{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu) == 0) {
    families.push_back(single("process_cpu_seconds_total", "CPU time of all threads.", MetricType::Counter,
                              static_cast<double>(cpu.tv_sec) + static_cast<double>(cpu.tv_nsec) * 1e-9));
  }
  // Counted from the field after the name, which is number 3 in proc(5).
  const std::vector<std::string> stat = process_stat();
  constexpr std::size_t kThreads = 20 - 3, kStart = 22 - 3, kVirtual = 23 - 3, kResident = 24 - 3;
  if (stat.size() > kResident) {
    const double ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
    const double page = static_cast<double>(::sysconf(_SC_PAGESIZE));
    families.push_back(single("process_resident_memory_bytes", "Memory that is resident, shared memory counted.",
                              MetricType::Gauge, std::stod(stat[kResident]) * page));
    families.push_back(single("process_virtual_memory_bytes", "Addresses that are mapped.", MetricType::Gauge,
                              std::stod(stat[kVirtual])));
    // Tells a leak from memory that the allocator keeps: that grows in steps, this does not.
    const struct mallinfo2 heap = ::mallinfo2();
    families.push_back(single("process_heap_bytes", "Memory that the program has allocated and not freed.",
                              MetricType::Gauge, static_cast<double>(heap.uordblks + heap.hblkhd)));
    families.push_back(single("process_threads", "Threads now.", MetricType::Gauge, std::stod(stat[kThreads])));
    families.push_back(single("process_start_time_seconds", "When the process started, since 1970.", MetricType::Gauge,
                              boot_time_s() + std::stod(stat[kStart]) / ticks));
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    families.push_back(single("process_open_fds", "Descriptors that are open.", MetricType::Gauge, open_descriptors()));
    families.push_back(single("process_max_fds", "Descriptors that may be open.", MetricType::Gauge,
                              static_cast<double>(limit.rlim_cur)));
  }
  return families;
}

std::string to_text(const std::vector<std::vector<prometheus::MetricFamily>>& parts) {
  const prometheus::TextSerializer serializer;
  std::string text;
  for (const auto& families : parts) text += serializer.Serialize(families);
  return text;
}

}  // namespace deltasync::metrics
