#include "receiver/targets/verify.hpp"

#include <cstring>

#include "delta/codec.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

/// Rows one after the other, if they are not there already.
void copy_tile(const TileRows& from, std::uint64_t rows, std::size_t row_bytes, std::vector<std::byte>& to) {
  if (from.first == to.data()) return;
  to.resize(static_cast<std::size_t>(rows) * row_bytes);
  for (std::uint64_t r = 0; r < rows; ++r) {
    std::memcpy(to.data() + r * row_bytes, from.first + r * from.row_stride, row_bytes);
  }
}

/// What one frame takes of the budget, given back unless it is spent: a frame that is refused comes again.
class Claim {
 public:
  explicit Claim(ResolvedBudget& budget) : budget_(budget) {}
  ~Claim() { budget_.give_back(bytes_); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  bool take(std::uint64_t bytes) noexcept {
    if (!budget_.take(bytes)) return false;
    bytes_ += bytes;
    return true;
  }
  Status take_for_classes(std::uint64_t bytes) {
    DS_TRY(budget_.take_for_classes(bytes));
    bytes_ += bytes;
    return {};
  }
  void spend() noexcept { bytes_ = 0; }

 private:
  ResolvedBudget& budget_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

Result<std::uint64_t> verify_chain(const Target& target, RecordChain chain, std::uint64_t digest,
                                   std::vector<std::byte>& scratch) {
  const Layout& layout = *target.layout();
  const Tile tile = tile_of(layout, chain.front()->tile);
  DS_ASSIGN(const TileRows live, target.live_tile(tile, scratch));
  if (chain.size() == 1) return delta::verify_tile(layout, *chain.front(), live.first, live.row_stride, digest);
  const auto row_bytes = static_cast<std::size_t>(tile.rect.cols) * layout.tensors()[tile.tensor].element_bytes;
  copy_tile(live, tile.rect.rows, row_bytes, scratch);
  for (const delta::TileRecord* record : chain) {
    DS_ASSIGN(digest, delta::apply_tile(layout, *record, scratch.data(), row_bytes, digest));
  }
  return digest;
}

std::uint64_t resolved_bytes(const Layout& layout, const StagedFrame& frame) {
  std::uint64_t bytes = 0;
  for (const delta::TileRecord& record : frame.records) bytes += delta::resolved_bytes(layout, record);
  return bytes;
}

std::uint64_t class_bytes(const Layout& layout, const StagedFrame& frame) {
  std::uint64_t bytes = 0;
  for (const delta::TileRecord& record : frame.records) {
    if (delta::traits(record.codec).needs_old_tile) bytes += delta::resolved_bytes(layout, record);
  }
  return bytes;
}

Status ResolvedBudget::take_for_classes(std::uint64_t bytes) {
  if (take(bytes)) return {};
  return Error(Errc::protocol, "more changes in exponent classes than the plan named");
}

bool ResolvedBudget::take(std::uint64_t bytes) noexcept {
  std::uint64_t left = left_.load(std::memory_order_relaxed);
  while (left >= bytes) {
    if (left_.compare_exchange_weak(left, left - bytes, std::memory_order_relaxed)) return true;
  }
  return false;
}

namespace {

Error wrong_digest(const Layout& layout, const delta::TileRecord& record) {
  return {Errc::corrupt,
          describe_tile(layout, record.tile) + ": the state digest after it differs: a wrong base or damaged bytes"};
}

/// The frame's changes as far as they are decoded without their tiles, resolved by the target where it can: by record,
/// one after the other in `resolved`, or in `kept`.
Result<std::vector<TileChanges>> resolve_there(const CanResolve& can, const Layout& layout, const StagedFrame& frame,
                                               MutByteSpan resolved, std::unique_ptr<KeptChanges>& kept) {
  std::vector<TileChanges> all(frame.records.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const delta::TileRecord& record = frame.records[i];
    const std::size_t bytes = delta::resolved_bytes(layout, record);
    all[i].tile = record.tile;
    all[i].count = record.changed;
    all[i].changes = resolved.first(bytes);
    resolved = resolved.subspan(bytes);
    if (!delta::traits(record.codec).decodes_alone()) {
      all[i].count = 0;
      continue;
    }
    DS_ASSIGN(all[i].kind, delta::decode_changes(layout, record, all[i].changes));
  }
  DS_ASSIGN(kept, can.resolve(all));
  return all;
}

/// Changes that were resolved here, as new elements, go to where the target keeps such. `left` are all that are in
/// `resolved`, contiguous; those that were resolved here have a count. The others close up; what they take is
/// returned.
Result<std::size_t> hand_over(const CanResolve& can, const Layout& layout, std::vector<TileChanges>& left,
                              MutByteSpan resolved, std::unique_ptr<KeptChanges>& kept) {
  std::size_t used = 0;
  const auto expected = left;
  DS_ASSIGN(kept, can.resolve(left));
  for (std::size_t i = 0; i < left.size(); ++i) {
    const TileChanges& of = left[i];
    if (of.resolved && of.digest_change != expected[i].digest_change) {
      return Error(Errc::corrupt,
                   describe_tile(layout, of.tile) + ": somebody wrote to live memory while it was verified");
    }
    if (of.kept) continue;
    if (used != 0 || of.changes.data() != resolved.data()) {
      std::memmove(resolved.data() + used, of.changes.data(), of.changes.size());
    }
    used += of.changes.size();
  }
  return used;
}

}  // namespace

Status verify_frame(Target& target, StagedFrame& frame, std::span<const std::uint64_t> before,
                    std::span<std::uint64_t> after, ResolvedBudget& budget) {
  const Layout& layout = *target.layout();
  const TargetCapabilities can = target.capabilities();
  frame.resolved.clear();
  frame.kept.clear();
  Claim claim(budget);
  const auto bytes = static_cast<std::size_t>(resolved_bytes(layout, frame));
  const bool keep = can.takes_decoded && bytes != 0 && claim.take(bytes);
  if (can.takes_decoded && !keep) DS_TRY(claim.take_for_classes(class_bytes(layout, frame)));
  RecycledBytes resolved(keep ? bytes : 0);
  MutByteSpan rest(resolved);
  std::unique_ptr<KeptChanges> kept[2];  // decoded alone, and over the tile
  std::vector<TileChanges> there;
  std::vector<TileChanges> left;
  if (keep && can.resolve != nullptr) {
    DS_ASSIGN(there, resolve_there(*can.resolve, layout, frame, rest, kept[0]));
  }
  std::vector<std::byte> scratch;
  for (std::size_t i = 0; i < frame.records.size(); ++i) {
    const delta::TileRecord& record = frame.records[i];
    const std::uint64_t digest = before[record.tile];
    if (!there.empty() && there[i].resolved) {
      after[record.tile] = digest + there[i].digest_change;
      if (after[record.tile] != record.digest_after) return wrong_digest(layout, record);
      if (there[i].kept) continue;
      // What the target keeps leaves gaps: all others move up, over what nobody needs any more.
      const MutByteSpan changes = there[i].changes;
      if (rest.data() != changes.data()) std::memmove(rest.data(), changes.data(), changes.size());
      left.push_back({record.tile, 0, {}, rest.first(changes.size())});
      rest = rest.subspan(changes.size());
      continue;
    }
    DS_ASSIGN(const TileRows live, target.live_tile(tile_of(layout, record.tile), scratch));
    if (keep) {
      const MutByteSpan changes = rest.first(delta::resolved_bytes(layout, record));
      DS_ASSIGN(after[record.tile], delta::resolve_tile(layout, record, live.first, live.row_stride, digest, changes));
      rest = rest.subspan(changes.size());
      if (changes.empty()) continue;
      left.push_back({record.tile, record.changed, delta::NumberKind::elements, changes, after[record.tile] - digest});
    } else {
      DS_ASSIGN(after[record.tile], delta::verify_tile(layout, record, live.first, live.row_stride, digest));
    }
  }
  std::size_t used = resolved.size() - rest.size();
  if (!there.empty() && used != 0) {
    DS_ASSIGN(used, hand_over(*can.resolve, layout, left, resolved, kept[1]));
  }
  if (used != 0) {
    resolved.resize(used);
    frame.resolved = std::move(resolved);
  }
  for (auto& some : kept) {
    if (some != nullptr) frame.kept.push_back(std::move(some));
  }
  claim.spend();
  return {};
}

}  // namespace deltasync
