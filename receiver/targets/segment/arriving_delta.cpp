#include "receiver/targets/segment/arriving_delta.hpp"

#include "base/log.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {
namespace {

/// Of a pull, for an agent that does not listen: all parts of a delta together.
constexpr auto kTellLimit = std::chrono::seconds(1);

}  // namespace

void ArrivingDelta::begin(const wire::TrainerDelta& delta) {
  const std::lock_guard lock(mutex_);
  left_ = kTellLimit;
  told_ = tell_delta(writer_, delta).ok();
}

void ArrivingDelta::came(const wire::TileRange& tiles, ByteSpan frame) {
  if (!told_) return;
  const std::lock_guard lock(mutex_);
  if (!told_) return;
  const auto start = std::chrono::steady_clock::now();
  const Status told = tell_frames(writer_, {tiles, {frame.begin(), frame.end()}}, Deadline(start + left_));
  left_ -= std::chrono::steady_clock::now() - start;
  if (told) return;
  told_ = false;
  log::debug("delta_not_handed_on error=\"{}\"", told.error().to_string());
}

void ArrivingDelta::give_up() noexcept {
  const std::lock_guard lock(mutex_);
  if (!told_.exchange(false)) return;
  static_cast<void>(tell_delta(writer_, {}));
}

}  // namespace deltasync::relay
