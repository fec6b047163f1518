#include "receiver/targets/segment/arriving_delta.hpp"

#include <chrono>

#include "base/log.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {
namespace {

/// For an agent that does not listen: after the first part that takes so long it is told no more of the delta.
constexpr auto kTellLimit = std::chrono::seconds(1);

}  // namespace

void ArrivingDelta::begin(const wire::TrainerDelta& delta) {
  const std::lock_guard lock(mutex_);
  told_ = tell_delta(writer_, delta).ok();
}

void ArrivingDelta::came(const wire::TileRange& tiles, ByteSpan frame) {
  if (!told_) return;
  const std::lock_guard lock(mutex_);
  if (!told_) return;
  const Status told = tell_frames(writer_, {tiles, {frame.begin(), frame.end()}}, Deadline::after(kTellLimit));
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
