// When the engines of a fleet serve a version, counted from the moment in which the trainers begin to offload it.
//
//   trainers: offload ─▶ diff ─▶ served      each host its part; a version is one when all have it
//   relay:    pull ─▶ commit ─▶ diff ─▶ served    the whole model; of one host it goes on while it comes
//   engine:   pull ─▶ commit ─▶ serves
//
// A pull takes its shares from all hosts of the trainers at once, or all from one relay. Those that pull from one place
// are dealt to its relays in turn.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "capacity/rates.hpp"
#include "capacity/topology.hpp"

namespace deltasync::capacity {

/// A part of what the last engine waited for.
struct PathShare {
  std::string stage;  ///< "offload", "diff", "pull by NAME", "commit by NAME", "diff by NAME"
  std::string limit;  ///< what allowed no more: "up links of NAME", "processors of NAME", "waiting" and so on
  double seconds = 0;
};

struct Prediction {
  bool full = false;             ///< whole models travel
  double wire_bytes = 0;         ///< that an engine takes
  std::vector<double> ready_s;   ///< of each engine, sorted; not empty
  std::vector<PathShare> path;   ///< of the last engine, in the order of time; sums up to its ready_s
  std::uint32_t last_group = 0;  ///< where the last engine is

  /// Until that part of the engines has it, rounded up to whole engines.
  double until(double part) const;
  double all_s() const { return ready_s.back(); }
  /// The limit that the last engine waited for longest.
  PathShare bottleneck() const;
};

/// The seed says which host is how much slower (Group::slower).
Prediction predict(const Topology& topology, const Rates& rates, std::uint64_t seed = 1);

struct RelayLevel {
  std::string before;       ///< the group of engines that takes from them
  std::uint32_t count = 0;  ///< relays, on hosts like the engines'
  Prediction then;
};
/// The best of some numbers of relays between the group of the last engine and what it takes from. Nothing: it is one
/// engine.
std::optional<RelayLevel> add_relay_level(const Topology& topology, const Rates& rates, std::uint64_t seed,
                                          const Prediction& now);

}  // namespace deltasync::capacity
