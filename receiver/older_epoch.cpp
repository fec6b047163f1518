#include "receiver/older_epoch.hpp"

#include <utility>

#include "base/log.hpp"

namespace deltasync::receiver {

Status OlderEpochs::check(const std::string& from, const Version& served, const TargetState* held) {
  if (held == nullptr || served.id.epoch >= held->version.id.epoch) return {};
  const bool follow = policy_ == OlderEpoch::follow;
  if (policy_ != OlderEpoch::fail && std::exchange(told_, served.id.epoch) != served.id.epoch) {
    log::warn("older_epoch agent={} held=\"{}\" served=\"{}\" policy={}", from, to_string(held->version),
              to_string(served), follow ? "follow" : "wait");
  }
  if (follow) return {};
  return Error(Errc::version_conflict, to_string(served) + " is served, of an older epoch than " +
                                           to_string(held->version) + ", which is held");
}

}  // namespace deltasync::receiver
