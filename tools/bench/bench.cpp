#include "bench/bench.hpp"

#include <algorithm>

namespace deltasync::bench {
namespace {

struct Case {
  const char* name;
  Result<Json> (*run)(const Options&);
};
constexpr Case kCases[] = {{"diff", run_diff},       {"codec", run_codec},      {"merge", run_merge},
                           {"apply", run_apply},     {"full", run_full},        {"e2e", run_e2e},
                           {"tensors", run_tensors}, {"baseline", run_baseline}};

}  // namespace

Result<Json> run(const Options& options) {
  std::string names;
  for (const auto& c : kCases) {
    if (options.name == c.name) {
      if (!options.from.empty() && options.name != "codec") {
        return Error(Errc::invalid_argument, "--from belongs to bench codec, not to bench " + options.name);
      }
      DS_ASSIGN(Json result, c.run(options));
      Json out{{"case", options.name}};
      if (options.name != "tensors" && options.from.empty()) out["model_gib"] = options.model_gib;
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
