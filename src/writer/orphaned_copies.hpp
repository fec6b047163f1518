// What a session leaves behind if it ends while a device may still write into its segment. The mapping, its
// registration and the open copy bracket stay, and so does the claim to the slot: a new session of this process would
// begin by closing the bracket.
#pragma once

#include <memory>

#include "shm/roles.hpp"
#include "shm/segment.hpp"
#include "writer/copy_streams.hpp"
#include "writer/slot_claim.hpp"

namespace deltasync {

struct OrphanedCopies {
  // Destroyed last to first.
  std::unique_ptr<SlotClaim> claim;
  std::shared_ptr<shm::Segment> segment;
  std::unique_ptr<shm::WriterRole> role;
  std::unique_ptr<CopyStreams> copy_streams;
};

/// Keeps it until the device is done with it, or for as long as the process lives.
void keep_orphaned(OrphanedCopies what);
/// Frees what devices are done with. Called before a slot is claimed.
void sweep_orphaned_copies();

}  // namespace deltasync
