// Versions of an older epoch than is held: ReceiverOptions::on_older_epoch, wherever versions come from.
#pragma once

#include <cstdint>
#include <string>

#include "deltasync/receiver.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::receiver {

class OlderEpochs {
 public:
  explicit OlderEpochs(OlderEpoch policy) : policy_(policy) {}

  OlderEpoch policy() const noexcept { return policy_; }
  /// Whether this version, which `from` serves, may take the place of what is held (null: nothing). Unless the policy
  /// is to fail, the log says once of each epoch that it is older.
  ///   - version_conflict: it may not.
  Status check(const std::string& from, const Version& served, const TargetState* held);

 private:
  const OlderEpoch policy_;
  std::uint64_t told_ = 0;  ///< the epoch of which the log has said it; 0: none
};

}  // namespace deltasync::receiver
