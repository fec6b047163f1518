// The ring's deltas as the files that src/delta/kept_delta.hpp describes, and which of them lead to what is served.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "agent/versions/ring.hpp"
#include "base/bytes.hpp"
#include "delta/kept_delta.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::agent {

/// Everything before the frames, which follow as they are in memory.
std::vector<std::byte> kept_delta_head(const RingEntry& entry);
/// Errors: those of shm::open_side_file() and delta::decode_kept_delta().
Result<delta::KeptDelta> read_kept_delta(const std::filesystem::path& path, const Layout& layout);

/// An entry of a delta that was read from a file.
std::shared_ptr<RingEntry> entry_of(delta::KeptDelta kept);

/// The chain of these deltas (in any order) that ends at exactly this state, oldest first; empty if none ends there. A
/// delta is part of it only if its old digests, put in place of those after it, have the root that it starts from. That
/// proves that it belongs to these bytes.
std::vector<RingEntryPtr> chain_to(const VersionId& version, const Digest128& root, std::vector<std::uint64_t> digests,
                                   const std::vector<RingEntryPtr>& deltas);

}  // namespace deltasync::agent
