// bench diff: reading both halves with the widest loads, against diff + encode + digest of the same pages.
#include <algorithm>

#include "base/trace.hpp"
#include "bench/halves.hpp"
#include "bench/limits.hpp"

namespace deltasync::bench {

Result<Json> run_diff(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  double limit_s = 1e300;
  double encode_s = 1e300;
  std::uint64_t changed = 0;
  // The two in turn, so that a machine whose speed drifts slows both.
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    limit_s = std::min(limit_s, read_both_once(halves.before(), halves.after(), pool));
    auto digests = halves.digests();
    const Stopwatch watch;
    const trace::Span span("diff");
    const auto delta = halves.encode(digests, pool);
    encode_s = std::min(encode_s, watch.seconds());
    changed = delta.changed;
  }
  const auto bytes = static_cast<double>(halves.layout().half_bytes());
  return Json{{"limit_gbps", bytes / limit_s / 1e9},
              {"diff_encode_gbps", bytes / encode_s / 1e9},
              {"ratio_to_limit", limit_s / encode_s},
              {"density", static_cast<double>(changed) / static_cast<double>(halves.layout().elements())},
              {"isa", delta::isa_name()}};
}

}  // namespace deltasync::bench
