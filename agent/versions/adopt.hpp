// What an agent of this name left in the segment directory: found, checked and taken over by the next one.
#pragma once

#include <cstdint>
#include <vector>

#include "agent/options.hpp"
#include "agent/versions/generation.hpp"
#include "agent/versions/reclaimer.hpp"

namespace deltasync::agent {

struct AdoptedSegments {
  std::vector<GenerationPtr> generations;  ///< ascending
  VersionId newest;                        ///< the newest version in them; epoch 0 if none
  std::uint64_t next_number = 1;           ///< of the next generation
};

/// Keeps the newest generation that holds a version, and a newer one that may still get its first. Removes older ones,
/// what can never be read again, and deltas whose segment is gone. The caller holds the lock of the agent's name.
Result<AdoptedSegments> adopt_segments(const CoreOptions& options, Reclaimer& reclaimer);

}  // namespace deltasync::agent
