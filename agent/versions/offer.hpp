// What the agent has at one moment, as the planner sees it: sizes, roots, versions; no bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"

namespace deltasync::agent {

/// One delta of the ring.
struct RingStep {
  Version from;
  Version to;
  Digest128 from_root;
  Digest128 to_root;
  std::uint64_t frames = 0;
  std::uint64_t frame_bytes = 0;
  std::uint64_t changed = 0;
  std::vector<Digest128> from_former_roots;  ///< of further states of `from` that it applies to
  bool partial = false;                      ///< it leads to `to` only together with what follows it
};

struct Offer {
  bool has_layout = false;
  Digest128 layout;
  bool has_version = false;  ///< false: the layout is known, no version was sealed yet
  Version served;
  Digest128 served_root;
  std::vector<Digest128> served_former_roots;  ///< which it was published with before some digests were taken again
  bool withdrawn = false;                      ///< its half is damaged: only deltas lead to it
  std::uint64_t full_bytes = 0;                ///< of a half
  std::vector<RingStep> ring;                  ///< a chain, oldest first; its last `to` is `served`
};

}  // namespace deltasync::agent
