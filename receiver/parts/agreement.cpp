#include "receiver/parts/agreement.hpp"

#include <algorithm>

namespace deltasync::receiver {

bool Agreement::is_wanted(const VersionId& version) const {
  if (!want_.held) return true;
  if (version.epoch < want_.held->epoch) return want_.older_epoch;
  if (version.epoch > want_.held->epoch) return true;
  return version.number > want_.held->number || (!want_.newer && version.number == want_.held->number);
}

/// Who serves an older version than this one, or another epoch's, may have a newer one by now.
void Agreement::ask_again(VersionId than) {
  step_ = Step::ask;
  for (Member& member : members_) {
    member.staged = false;
    if (member.newest && *member.newest < than) member.newest.reset();
  }
}

/// All have answered. The oldest of what they serve is what all may still have: a member that is ahead has it in its
/// ring. If it is not wanted, or a member has it no more, all wait for those that are behind.
void Agreement::decide() {
  VersionId oldest = *members_.front().newest;
  VersionId newest = oldest;
  for (const Member& member : members_) {
    oldest = std::min(oldest, *member.newest);
    newest = std::max(newest, *member.newest);
  }
  for (const VersionId& candidate : {oldest, newest}) {
    if (!is_wanted(candidate) || gone_.contains(candidate)) continue;
    version_ = candidate;
    const bool held = want_.held && *want_.held == candidate;
    step_ = held ? Step::up_to_date : Step::pull;
    return;
  }
  // Nothing in it for us: those that are behind are asked again, or all, if none is.
  ask_again(oldest == newest ? VersionId{newest.epoch, newest.number + 1} : newest);
}

void Agreement::heard(std::size_t member, VersionId newest) {
  if (step_ != Step::ask) return;
  members_[member].newest = newest;
  const bool all = std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.newest.has_value(); });
  if (all) decide();
}

void Agreement::staged(std::size_t member, VersionId version) {
  if (step_ != Step::pull || version != version_) return;
  members_[member].staged = true;
  const bool all = std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.staged; });
  if (all) step_ = Step::agreed;
}

void Agreement::refused(std::size_t member, bool for_good) {
  if (step_ != Step::pull) return;
  if (for_good) gone_.insert(version_);
  members_[member].newest.reset();
  ask_again(version_);
}

}  // namespace deltasync::receiver
