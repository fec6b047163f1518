// The same bytes to all devices of a node, as servers of whole replicas get them: each copies them from host memory, or
// one does, and NCCL broadcasts them from there.
#pragma once

#include <optional>
#include <string>

#include "bench/bench.hpp"

namespace deltasync::bench {

struct Fanout {
  std::size_t devices = 0;
  double h2d_gbps = 0;   ///< what all devices get together
  double nccl_gbps = 0;  ///< likewise; 0: see no_nccl
  std::string no_nccl;   ///< why there is none
};

/// The best of so many rounds; nothing where there is one device only. corrupt if a device got other bytes.
Result<std::optional<Fanout>> measure_fanout(const Options& options, unsigned rounds);

}  // namespace deltasync::bench
