// What work costs, as `deltasync bench` measures it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync::capacity {

/// Seconds of one core. Work takes all cores of its host: run the agents with as many --threads.
struct Rates {
  // for each byte of a version
  double offload_s = 0;       ///< the trainer's copy, while the agent's overlapped diff has what is left of the cores
  double diff_s = 0;          ///< by the agent after the commit, until it serves the version
  double relay_commit_s = 0;  ///< of a delta, into the segment of the relay's node
  double relay_diff_s = 0;    ///< by that node's agent, until it serves the version
  // for each byte on the wire
  double send_s = 0;
  double receive_s = 0;  ///< verifying whole tiles included
  // for each parameter that changed
  double verify_s = 0;  ///< receiving and verifying frames
  double commit_s = 0;

  double bits_per_change = 0;
  double pull_s = 0;  ///< of each version and hop, whatever its size. Not of a core: waiting

  std::vector<std::string>
      assumed;  ///< cases that no benchmark of the user's has measured: those of the built-in machine
};

/// Of the machine of benchmarks.md, 2 virtual cores.
Rates builtin_rates();

/// Puts what `deltasync bench CASE --json` printed in place of what is assumed. Of the lines of `text` those count that
/// are JSON objects. `name` stands before errors.
///   - Errc::invalid_argument: no line of a benchmark, or one without the fields of its case.
Status add_benchmarks(Rates& rates, std::string_view text, std::string_view name);

}  // namespace deltasync::capacity
