#include "agent/versions/ring.hpp"

#include <iterator>
#include <utility>

#include "base/hash.hpp"

namespace deltasync::agent {

std::shared_ptr<RingEntry> RingEntry::make(delta::Delta delta, Version from, Version to, double encode_s,
                                           std::vector<DigestBefore> before) {
  auto entry = std::make_shared<RingEntry>();
  entry->frame_hashes.reserve(delta.frames.size());
  for (const delta::Frame& frame : delta.frames) entry->frame_hashes.push_back(xxh3_64(frame.bytes));
  entry->delta = std::make_shared<const delta::Delta>(std::move(delta));
  entry->from = std::move(from);
  entry->to = std::move(to);
  entry->made_at = std::chrono::steady_clock::now();
  entry->encode_s = encode_s;
  entry->before = std::move(before);
  return entry;
}

std::vector<DigestBefore> changed_digests(std::span<const std::uint64_t> from, std::span<const std::uint64_t> to) {
  std::vector<DigestBefore> changed;
  for (std::size_t tile = 0; tile < to.size(); ++tile) {
    if (from[tile] != to[tile]) changed.push_back({tile, from[tile]});
  }
  changed.shrink_to_fit();
  return changed;
}

std::vector<RingEntryPtr> DeltaRing::push(RingEntryPtr entry, std::uint64_t half_bytes) {
  std::vector<RingEntryPtr> evicted;
  const delta::Delta& delta = *entry->delta;
  if (!entries_.empty()) {
    const delta::Delta& last = *entries_.back()->delta;
    if (last.to != delta.from || last.to_root != delta.from_root || last.layout != delta.layout) evicted = clear();
  }
  bytes_ += entry->bytes();
  entries_.push_back(std::move(entry));
  const auto too_much = [&] {
    if (entries_.size() > 1) return bytes_ > bytes_max_ || entries_.size() > entries_max_;
    // The newest alone: kept while it saves anything at all.
    return bytes_ > bytes_max_ && bytes_ >= half_bytes;
  };
  while (!entries_.empty() && too_much()) {
    bytes_ -= entries_.front()->bytes();
    evicted.push_back(std::move(entries_.front()));
    entries_.pop_front();
  }
  return evicted;
}

std::vector<RingEntryPtr> DeltaRing::clear() {
  std::vector<RingEntryPtr> evicted(std::make_move_iterator(entries_.begin()), std::make_move_iterator(entries_.end()));
  entries_.clear();
  bytes_ = 0;
  return evicted;
}

std::vector<RingEntryPtr> DeltaRing::replace(std::vector<RingEntryPtr> entries) {
  std::vector<RingEntryPtr> before = clear();
  ++revision_;
  for (RingEntryPtr& entry : entries) {
    bytes_ += entry->bytes();
    entries_.push_back(std::move(entry));
  }
  return before;
}

}  // namespace deltasync::agent
