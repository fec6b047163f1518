// What the agent counts. Written with relaxed atomics from any thread; read for /metrics and /v1/status.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "deltasync/result.hpp"

namespace deltasync::agent {

inline constexpr std::size_t kErrcCount = static_cast<std::size_t>(Errc::cancelled) + 1;

struct Metrics {
  using Counter = std::atomic<std::uint64_t>;

  Counter versions{0};           ///< published
  Counter deltas{0};             ///< encoded
  Counter delta_bytes{0};        ///< in all frames ever encoded
  Counter elements_changed{0};   ///< in all deltas
  Counter elements_compared{0};  ///< in all deltas
  Counter encode_us{0};          ///< in all, from the seal on
  Counter batches_behind{0};     ///< of tiles, diffed while their version was still being offloaded
  Counter batches_after{0};      ///< diffed after the seal
  Counter digest_us{0};          ///< whole halves, after a start or a new layout
  Counter tiles_damaged{0};      ///< whose bytes were not what their digests said
  Counter scrub_bytes{0};        ///< read again
  Counter scrub_passes{0};       ///< over a whole half
  Counter merges{0};             ///< chains merged
  Counter merge_bytes{0};        ///< of all merged deltas
  Counter merge_us{0};           ///< in all
  Counter merges_failed{0};      ///< chains that could not be merged, or were not worth it
  Counter merge_hits{0};         ///< plans answered with a merged or compact delta that was made for another
  Counter compacts{0};           ///< deltas made compact
  Counter compact_bytes{0};      ///< of all compact deltas
  Counter compact_us{0};         ///< in all
  Counter compacts_failed{0};    ///< that could not be made, or were not smaller
  Counter leases{0};             ///< begun
  Counter leases_revoked{0};     ///< because a writer needed the half
  Counter plans_expired{0};      ///< by their deadline, or because they pinned too many evicted deltas
  Counter pulls_up_to_date{0};   ///< plans answered so
  Counter pulls_delta{0};
  Counter pulls_full{0};
  Counter bytes_extent{0};  ///< of halves, by sendfile
  Counter bytes_frames{0};  ///< of deltas
  Counter bytes_raw_tiles{0};
  Counter bytes_digests{0};
  Counter bytes_layout{0};
  Counter connections{0};          ///< accepted by the pull server
  Counter connections_refused{0};  ///< over the limit
  Counter handshakes_failed{0};
  Counter http_requests{0};
  std::array<Counter, kErrcCount> errors{};  ///< sent to receivers or seen on their connections, by code

  void count_error(Errc code) { errors[static_cast<std::size_t>(code)].fetch_add(1, std::memory_order_relaxed); }
  static void add(Counter& counter, std::uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }
};

}  // namespace deltasync::agent
