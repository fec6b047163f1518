#include "agent/versions/snapshot.hpp"

#include <set>
#include <utility>

#include "agent/versions/arriving_delta.hpp"
#include "base/racing_reads.hpp"
#include "delta/frame.hpp"
#include "delta/geometry.hpp"

namespace deltasync::agent {
namespace {

bool still_there(const ServedVersion& served) {
  return shm::still_holds(*served.generation->segment, served.half.half, served.half.sequence);
}

RingStep make_step(const RingEntry& entry) {
  const delta::Delta& d = *entry.delta;
  const std::uint64_t frames = entry.arriving ? entry.arriving->frames() : d.frames.size();
  RingStep step{entry.from, entry.to, d.from_root, d.to_root, frames, d.frame_bytes, d.changed, {}, false};
  for (const FormerState& state : entry.from_former) step.from_former_roots.push_back(state.root);
  step.partial = entry.partial;
  return step;
}

Offer make_offer(const Snapshot& now, const ServedPtr& served) {
  Offer offer;
  if (now.generation) {
    offer.has_layout = true;
    offer.layout = now.generation->layout->digest();
    offer.full_bytes = now.generation->layout->half_bytes();
  }
  if (served) {
    offer.has_version = true;
    offer.served = served->version;
    offer.served_root = served->root;
    offer.withdrawn = !served->damaged.empty();
    for (const FormerState& state : served->former) offer.served_former_roots.push_back(state.root);
  }
  for (const RingEntryPtr& entry : now.ring) offer.ring.push_back(make_step(*entry));
  return offer;
}

/// The bytes of one that is damaged are no base for a delta that the relay made from others.
bool leads_from(const RingEntryPtr& delta, const ServedPtr& served) {
  return delta && served && delta->delta->layout == served->generation->layout->digest() &&
         delta->delta->from == served->version.id && delta->delta->from_root == served->root;
}

}  // namespace

std::vector<std::uint64_t> ServedVersion::damaged_tiles() const {
  std::set<std::uint64_t> tiles(damaged.begin(), damaged.end());
  for (const FormerState& state : former) {
    for (const DigestBefore& was : state.before) tiles.insert(was.tile);
  }
  return {tiles.begin(), tiles.end()};
}

bool copy_while_served(const ServedVersion& served, std::span<const std::uint64_t> tiles, std::byte* out) {
  const Generation& generation = *served.generation;
  if (!still_there(served)) return false;
  {
    const RacingReads racing;
    for (const std::uint64_t tile : tiles) {
      out = delta::copy_tile(*generation.layout, generation.half(served.half.half), tile, out);
    }
  }
  return still_there(served);
}

std::optional<std::vector<std::uint64_t>> wrong_tiles(const ServedVersion& served,
                                                      std::span<const std::uint64_t> tiles) {
  const Generation& generation = *served.generation;
  std::vector<std::uint64_t> wrong;
  {
    const RacingReads racing;
    for (const std::uint64_t tile : tiles) {
      const std::uint64_t digest = delta::tile_digest(*generation.layout, generation.half(served.half.half), tile);
      if (digest != (*served.digests)[static_cast<std::size_t>(tile)]) wrong.push_back(tile);
    }
  }
  if (!still_there(served)) return std::nullopt;
  return wrong;
}

SnapshotPtr make_snapshot(GenerationPtr generation, ServedPtr served, ServedPtr arriving, RingEntryPtr ahead,
                          const DeltaRing& ring) {
  auto next = std::make_shared<Snapshot>();
  next->generation = std::move(generation);
  next->served = std::move(served);
  next->arriving = std::move(arriving);
  next->ring.assign(ring.entries().begin(), ring.entries().end());
  next->ring_bytes_max = ring.bytes_max();
  next->ring_revision = ring.revision();
  next->offer = make_offer(*next, next->served);
  if (next->arriving) next->offer_arriving = make_offer(*next, next->arriving);
  if (leads_from(ahead, next->served)) {
    next->ahead = std::move(ahead);
    next->offer_ahead = next->offer;
    next->offer_ahead.ring.push_back(make_step(*next->ahead));
    next->offer_ahead.served = next->ahead->to;
    next->offer_ahead.served_root = next->ahead->delta->to_root;
    next->offer_ahead.served_former_roots.clear();
    next->offer_ahead.withdrawn = false;
  }
  return next;
}

}  // namespace deltasync::agent
