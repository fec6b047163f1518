// What the agent counts and measures, from any thread; read for /metrics and /v1/status. Figures that are taken when
// somebody asks are in metrics_page.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/metrics.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

inline constexpr std::size_t kErrcCount = static_cast<std::size_t>(Errc::cancelled) + 1;

struct Metrics {
  using Counter = metrics::Counter;
  using Durations = metrics::Durations;

  metrics::Registry registry;  // first: all others live in it

  Counter versions = counter("versions_total", "Versions published.");
  Counter deltas = counter("deltas_total", "Deltas encoded.");
  Counter handed_deltas =
      counter("handed_deltas_total", "Deltas of these that a relay handed over: no halves were compared.");
  Counter delta_bytes = counter("delta_bytes_total", "Bytes of all deltas encoded.");
  Counter elements_changed = counter("elements_changed_total", "Elements that differed between consecutive versions.");
  Counter elements_compared = counter("elements_compared_total", "Elements compared between consecutive versions.");
  Counter encode_seconds = counter("encode_seconds_total", "Time spent on diffs and encoding after the seal.");
  Counter batches_overlapped =
      counter("batches_diffed_overlapped_total", "Batches of tiles diffed while their version was being offloaded.");
  Counter batches_after =
      counter("batches_diffed_after_total", "Batches of tiles diffed after their version was sealed.");
  Counter tiles_damaged = counter("tiles_damaged_total", "Tiles whose bytes were not what their digests said.");
  Counter scrub_bytes = counter("scrub_bytes_total", "Bytes of what is served that were read again.");
  Counter scrub_passes = counter("scrub_passes_total", "Times that all of what is served was read again.");
  Counter digest_seconds = counter("digest_seconds_total", "Time spent on digests of whole halves.");
  Counter merges = counter("merges_total", "Chains of deltas merged.");
  Counter merge_bytes = counter("merge_bytes_total", "Bytes of all merged deltas.");
  Counter merge_seconds = counter("merge_seconds_total", "Time spent on merges.");
  Counter merges_failed = counter("merges_failed_total", "Chains that could not be merged, or were not worth it.");
  Counter merge_hits =
      counter("merge_hits_total", "Plans answered with a merged or compact delta that was made for another.");
  Counter compacts = counter("compacts_total", "Deltas made compact, for slow links.");
  Counter compact_bytes = counter("compact_bytes_total", "Bytes of all compact deltas.");
  Counter compact_seconds = counter("compact_seconds_total", "Time spent on compact deltas.");
  Counter compacts_failed =
      counter("compacts_failed_total", "Compact deltas that could not be made, or were not smaller.");
  Counter pulls_up_to_date = pulls("up_to_date");
  Counter pulls_delta = pulls("delta");
  Counter pulls_full = pulls("full");
  Counter bytes_extent = sent("extent");  ///< of halves, by sendfile
  Counter bytes_frames = sent("frames");  ///< of deltas
  Counter bytes_raw_tiles = sent("raw_tiles");
  Counter bytes_digests = sent("digests");
  Counter bytes_layout = sent("layout");
  Counter leases = counter("leases_total", "Leases begun.");
  Counter local_pulls =
      counter("local_pulls_total", "Full pulls of receivers that copy out of the segment themselves.");
  Counter leases_revoked = counter("leases_revoked_total", "Leases revoked because a writer needed the half.");
  Counter plans_expired =
      counter("plans_expired_total", "Plans ended by their deadline or for the memory that they held.");
  Counter connections = counter("connections_total", "Connections accepted.");
  Counter connections_refused = counter("connections_refused_total", "Connections answered with busy.");
  Counter connections_evicted =
      counter("connections_evicted_total", "Connections that had not authenticated when others came.");
  Counter sent_elsewhere =
      counter("sent_elsewhere_total", "Plans of receivers for which there was no place (--children-max).");
  Counter memory_refused =
      counter("peer_memory_refused_total", "Requests and answers for which peers had left no memory.");
  Counter handshakes_failed =
      counter("handshakes_failed_total", "Connections that did not authenticate; not those that left without a word.");
  Counter http_requests = counter("http_requests_total", "HTTP requests answered.");
  std::array<Counter, kErrcCount> errors = all_errors(std::make_index_sequence<kErrcCount>());

  Durations offload =
      registry.durations("offload_duration_seconds", "A writer's offload of one version, from its begin to the seal.");
  Durations guard =
      registry.durations("guard_duration_seconds", "Of that, the wait for a half that was still being diffed or read.");
  Durations diff = registry.durations("diff_duration_seconds", "From a version's seal to its delta.");
  Durations pull =
      registry.durations("pull_duration_seconds", "A receiver's plan, from its answer until it was released.");

  void count_error(Errc code) { errors[static_cast<std::size_t>(code)].add(); }
  template <class N>
  static void add(Counter& counter, N n) {
    counter.add(static_cast<double>(n));
  }

 private:
  Counter counter(const char* name, const char* help) { return registry.counter(name, help); }
  Counter pulls(const char* mode) {
    return registry.counter("pulls_total", "Plans answered, by mode.", {{"mode", mode}});
  }
  Counter sent(const char* kind) {
    return registry.counter("sent_bytes_total", "Payload bytes sent to receivers, by kind.", {{"kind", kind}});
  }
  template <std::size_t... Code>
  std::array<Counter, kErrcCount> all_errors(std::index_sequence<Code...>) {
    return {registry.counter("errors_total", "Errors answered to receivers or met on their connections, by code.",
                             {{"code", std::string(to_string(static_cast<Errc>(Code)))}})...};
  }
};

}  // namespace deltasync::agent
