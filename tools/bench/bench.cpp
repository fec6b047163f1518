#include "bench/bench.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "deltasync/timeline.hpp"
#include "tools/cli/trace_timeline.hpp"

namespace deltasync::bench {
namespace {

struct Case {
  const char* name;
  Result<Json> (*run)(const Options&);
};
constexpr Case kCases[] = {{"diff", run_diff},         {"codec", run_codec},
                           {"merge", run_merge},       {"apply", run_apply},
                           {"offload", run_offload},   {"export", run_export},
                           {"full", run_full},         {"packed", run_packed},
                           {"partial", run_partial},   {"e2e", run_e2e},
                           {"tensors", run_tensors},   {"relay", run_relay},
                           {"fanout", run_fanout},     {"fleet-metadata", run_fleet_metadata},
                           {"baseline", run_baseline}, {"gpu", run_gpu},
                           {"copy", run_copy},         {"colocated", run_colocated}};

/// A new directory beside the timeline's file, for what the processes write; it goes with this.
class PartsDirectory {
 public:
  static Result<PartsDirectory> make(const std::filesystem::path& timeline) {
    std::string pattern = timeline.string() + ".parts-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) return Error::from_errno("mkdtemp " + pattern, errno);
    return PartsDirectory(pattern);
  }
  PartsDirectory(PartsDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  PartsDirectory& operator=(PartsDirectory&&) = delete;
  ~PartsDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  explicit PartsDirectory(std::filesystem::path path) : path_(std::move(path)) {}
  std::filesystem::path path_;
};

/// Joins what the processes wrote, all of which have ended but this one.
Status write_all_timelines(const Options& options) {
  DS_TRY(write_timeline(trace_part(options, "trainer")));
  std::vector<tools::Timeline> traces;
  for (const char* process : {"trainer", "agent", "receiver"}) {
    const std::filesystem::path part = trace_part(options, process);
    std::ostringstream text;
    if (std::ifstream in(part, std::ios::binary); !in || !(text << in.rdbuf()))
      continue;  // the case has no such process
    DS_ASSIGN(tools::Timeline trace, tools::parse_trace(text.str(), part.string()));
    traces.push_back(std::move(trace));
  }
  std::ofstream out(options.trace, std::ios::binary | std::ios::trunc);
  out << tools::to_trace_json(tools::merge_traces(std::move(traces)));
  out.close();
  if (!out) return Error(Errc::io, "trace " + options.trace.string() + ": cannot write");
  return {};
}

Result<Json> run_case(const Case& c, const Options& given) {
  if (given.trace.empty()) return c.run(given);
  start_timeline("trainer");
  DS_TRY(write_timeline(given.trace));  // one that cannot be written is better known now
  DS_ASSIGN(const PartsDirectory directory, PartsDirectory::make(given.trace));
  Options options = given;
  options.trace_parts = directory.path();
  auto result = c.run(options);
  stop_timeline();
  if (result) DS_TRY(write_all_timelines(options));
  return result;
}

}  // namespace

std::filesystem::path trace_part(const Options& options, const std::string& process) {
  return options.trace_parts.empty() ? std::filesystem::path() : options.trace_parts / (process + ".json");
}

Result<Json> run(const Options& options) {
  std::string names;
  for (const auto& c : kCases) {
    if (options.name == c.name) {
      if (!options.from.empty() && options.name != "codec" && options.name != "packed") {
        return Error(Errc::invalid_argument, "--from belongs to bench codec and packed, not to bench " + options.name);
      }
      if (options.master && options.name != "diff" && options.name != "codec" && options.name != "apply") {
        return Error(Errc::invalid_argument, "--master belongs to bench diff, codec and apply, not to " + options.name);
      }
      if (options.compact && options.name != "e2e") {
        return Error(Errc::invalid_argument, "--compact belongs to bench e2e, not to bench " + options.name);
      }
      if (options.fake_device && options.name != "gpu") {
        return Error(Errc::invalid_argument, "--fake-device belongs to bench gpu, not to bench " + options.name);
      }
      DS_ASSIGN(Json result, run_case(c, options));
      Json out{{"case", options.name}};
      const bool has_model = options.name != "tensors" && options.name != "fleet-metadata" && options.from.empty();
      if (has_model) out["model_gib"] = options.model_gib;
      out["threads"] = options.threads;
      out.update(result);
      return out;
    }
    names += std::string(names.empty() ? "" : ", ") + c.name;
  }
  return Error(Errc::invalid_argument, "no bench case '" + options.name + "'; there are " + names);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

}  // namespace deltasync::bench
