#include "receiver/targets/segment/arriving_update.hpp"

#include <utility>

#include "base/log.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(500);

}  // namespace

Status ArrivingUpdate::open(bool shared, ThreadPool& pool, const CallContext& until) {
  over_ = !shared;
  if (shared) {
    auto memory = shm::ArrivingMemory::make({layout_.tile_count(), layout_.half_bytes()}, pool, until);
    if (memory.ok()) {
      shared_ = *std::move(memory);
      return {};
    }
    if (until.over()) return std::move(memory).error();
    log::warn("update_not_shared error=\"{}\" effect=\"the version is handed on once it is whole\"",
              memory.error().to_string());
  }
  DS_ASSIGN(own_, HostMemory::map(layout_.half_bytes(), pool, until));
  return {};
}

void ArrivingUpdate::announce(const Version& version, const Digest128& root, std::span<const std::uint64_t> digests,
                              std::span<const std::uint8_t> have) {
  if (!shared_ || std::exchange(over_, true)) return;
  for (std::uint64_t tile = 0; tile < have.size(); ++tile) {
    if (have[static_cast<std::size_t>(tile)] != 0) shared_->set_in_place(tile);
  }
  tell_arrival(writer_, {layout_.digest(), version, root, {digests.begin(), digests.end()}}, shared_->file());
  announced_ = true;
  log::info("update_announced version=\"{}\" root={}", to_string(version), to_string(root));
}

void ArrivingUpdate::came(std::span<const std::uint64_t> tiles) {
  if (!announced_) return;
  for (const std::uint64_t tile : tiles) shared_->set_in_place(tile);
  const std::unique_lock lock(looking_, std::try_to_lock);
  const auto now = std::chrono::steady_clock::now();
  if (!lock.owns_lock() || now - looked_at_ < kLookEvery) return;
  look_for_agent(writer_);
  looked_at_ = std::chrono::steady_clock::now();
}

void ArrivingUpdate::give_up() noexcept {
  if (announced_.exchange(false)) end_arrival(writer_, true);
}

void ArrivingUpdate::committed() noexcept {
  if (announced_.exchange(false)) end_arrival(writer_, false);
}

void ArrivingUpdate::release() noexcept {
  give_up();
  own_.release();
  shared_.reset();
}

std::shared_ptr<void> ArrivingUpdate::take() {
  give_up();
  if (shared_) return std::shared_ptr<shm::ArrivingMemory>(std::move(shared_));
  auto own = std::make_shared<HostMemory>();
  own->swap(own_);
  return own;
}

}  // namespace deltasync::relay
