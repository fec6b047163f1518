#include "receiver/targets/device/change_arena.hpp"

#include <algorithm>
#include <numeric>

#include "base/log.hpp"

namespace deltasync {
namespace {

/// Rooms begin at a multiple of what a run takes, so that runs can be counted through.
constexpr std::uint64_t kRoomAlignment = sizeof(gpu::WordRun);
static_assert(kRoomAlignment % alignof(gpu::WordRun) == 0 && alignof(gpu::WordRun) == 8);
constexpr std::uint64_t kBlockAlignment = 256;
/// The first block's part of what there may be: many updates need no second one.
constexpr std::uint64_t kFirstPart = 4;
/// How much more than the largest of the last updates is too much.
constexpr std::uint64_t kTooLarge = 4;

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace

std::optional<ChangeArena::Room> ChangeArena::claim(std::uint64_t bytes, std::uint64_t pieces) {
  bytes = rounded(bytes, kRoomAlignment);
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_) {
    if (auto room = claim_in_locked(block, bytes, pieces)) return room;
  }
  if (!grow_locked(bytes + pieces * sizeof(gpu::WordPiece))) return std::nullopt;
  return claim_in_locked(blocks_.back(), bytes, pieces);
}

std::optional<ChangeArena::Room> ChangeArena::claim_in_locked(Block& block, std::uint64_t bytes, std::uint64_t pieces) {
  const std::uint64_t piece_bytes = pieces * sizeof(gpu::WordPiece);
  if (block.back - block.front < bytes + piece_bytes) return std::nullopt;
  std::optional<Room> room(std::in_place, *this, block, block.front, bytes, block.back - piece_bytes, pieces);
  block.front += bytes;
  block.back -= piece_bytes;
  ++block.rooms;
  used_ += room->takes();
  most_used_ = std::max(most_used_, used_);
  return room;
}

/// By as much as there is already. Where the device has less, by what is needed now.
bool ChangeArena::grow_locked(std::uint64_t bytes) {
  const std::uint64_t needed = rounded(bytes, kBlockAlignment);
  if (refused_ || needed > bytes_max_ - bytes_) return false;
  const std::uint64_t wanted = std::max(bytes_, bytes_max_ / kFirstPart) / kBlockAlignment * kBlockAlignment;
  auto memory = device_.allocate(std::min(std::max(needed, wanted), bytes_max_ - bytes_));
  if (!memory.ok() && wanted > needed) memory = device_.allocate(needed);
  if (!memory.ok()) {
    refused_ = true;
    log::warn("device_target has_no_room_for_changes device=\"{}\" bytes={} why=\"{}\"", device_.name(), bytes_,
              memory.error().message());
    return false;
  }
  Block& block = blocks_.emplace_back();
  block.memory = *std::move(memory);
  block.back = block.memory.bytes() / sizeof(gpu::WordPiece) * sizeof(gpu::WordPiece);
  bytes_ += block.memory.bytes();
  log::info("device_target keeps_changes device=\"{}\" bytes={}", device_.name(), bytes_);
  return true;
}

void ChangeArena::give_back(const Room& room) {
  const std::lock_guard lock(mutex_);
  used_ -= room.takes();
  Block& block = *room.block_;
  if (--block.rooms != 0) return;
  block.front = 0;
  block.back = block.memory.bytes() / sizeof(gpu::WordPiece) * sizeof(gpu::WordPiece);
}

bool ChangeArena::is_too_large() {
  const std::lock_guard lock(mutex_);
  refused_ = false;
  if (most_used_ != 0) used_before_[updates_++ % used_before_.size()] = most_used_;
  most_used_ = used_;
  if (used_ != 0 || updates_ < used_before_.size()) return false;
  return bytes_ / kTooLarge > *std::max_element(used_before_.begin(), used_before_.end());
}

void ChangeArena::give_up() {
  const std::lock_guard lock(mutex_);
  if (used_ != 0) return;
  log::info("device_target gives_back_changes device=\"{}\" bytes={}", device_.name(), bytes_);
  blocks_.clear();
  bytes_ = 0;
}

void ChangeArena::abandon() {
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_) block.memory.abandon();
}

std::uint64_t ChangeArena::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace deltasync
