#include "agent/versions/delta_arrival.hpp"

#include <memory>
#include <utility>

#include "base/log.hpp"

namespace deltasync::agent {
namespace {

constexpr auto kFramePatience = std::chrono::seconds(5);  ///< without a frame

}  // namespace

Status DeltaArrival::begin(std::uint64_t connection, const LayoutPtr& layout, wire::TrainerDelta said) {
  const std::lock_guard lock(mutex_);
  if (now_) end_locked(said.to.id.valid() ? "the relay brings another one" : "the relay has given it up");
  if (!said.to.id.valid()) return {};
  if (said.layout != layout->digest()) {
    return Error(Errc::layout_mismatch,
                 "a delta of layout " + to_string(said.layout) + ", the segment is of " + to_string(layout->digest()));
  }
  if (said.from.id.epoch != said.to.id.epoch || said.from.id.number >= said.to.id.number) {
    return Error(Errc::invalid_argument,
                 "a delta from " + to_string(said.from) + " to " + to_string(said.to) + " goes not on in one epoch");
  }
  delta::Delta sums;
  sums.layout = said.layout;
  sums.from = said.from.id;
  sums.to = said.to.id;
  sums.from_root = said.from_root;
  sums.to_root = said.to_root;
  sums.changed = said.changed;
  sums.frame_bytes = said.frame_bytes;
  auto entry = RingEntry::make(std::move(sums), std::move(said.from), std::move(said.to), 0);
  entry->arriving = std::make_shared<ArrivingDelta>(layout, said.frames, said.frame_bytes);
  now_ = std::move(entry);
  connection_ = connection;
  tiles_ = 0;
  moved_at_ = Clock::now();
  log::debug("delta_arrives version=\"{}\" from=\"{}\"", to_string(now_->to), to_string(now_->from));
  versions_.expect(now_);
  return {};
}

Status DeltaArrival::take(std::uint64_t connection, wire::TrainerFrames part) {
  std::shared_ptr<ArrivingDelta> arriving;
  {
    const std::lock_guard lock(mutex_);
    if (!now_ || connection_ != connection) return {};
    arriving = now_->arriving;
  }
  Status taken = arriving->add(part.tiles, std::move(part.frame));
  if (taken) return taken;
  const std::lock_guard lock(mutex_);
  if (now_ && now_->arriving == arriving) end_locked("a part of it is wrong");
  return taken;
}

void DeltaArrival::end(std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  if (now_ && connection == connection_) end_locked("its relay is gone");
}

void DeltaArrival::doubted(const RingEntryPtr& delta, const std::string& who) {
  const std::lock_guard lock(mutex_);
  if (now_ != delta) return;
  log::warn("delta_doubted version=\"{}\" found_by=\"{}\" effect=\"it is served once the relay has committed it\"",
            to_string(now_->to), who);
  end_locked("a receiver could not verify it");
}

void DeltaArrival::look() {
  const std::lock_guard lock(mutex_);
  if (!now_) return;
  const SnapshotPtr snapshot = versions_.snapshot();
  const bool passed = !snapshot->served || snapshot->served->version.id.epoch != now_->to.id.epoch ||
                      snapshot->served->version.id.number >= now_->to.id.number;
  if (passed) return end_locked("it is served, or cannot be any more");
  const auto at = Clock::now();
  const std::uint64_t tiles = now_->arriving->tiles_settled();
  if (std::exchange(tiles_, tiles) != tiles) moved_at_ = at;
  const bool whole = tiles == snapshot->generation->layout->tile_count();
  if (whole || at - moved_at_ < kFramePatience) return;
  log::warn("delta_stands version=\"{}\" tiles={} effect=\"receivers wait until the relay has committed it\"",
            to_string(now_->to), tiles);
  end_locked("no more of it comes");
}

void DeltaArrival::end_locked(const char* why) {
  now_->arriving->end();
  versions_.expect_no_more(now_);
  log::debug("delta_arrives_no_more version=\"{}\" why=\"{}\"", to_string(now_->to), why);
  now_.reset();
}

}  // namespace deltasync::agent
