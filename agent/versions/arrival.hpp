// While nothing is served: the version that a relay is writing. Receivers plan for it at once, and get each tile when
// it is in place (ServedVersion::arriving). If it comes to nothing, their leases end, and the half is given back once
// none of them reads it.
#pragma once

#include <vector>

#include "agent/versions/leases.hpp"
#include "agent/versions/version_store.hpp"

namespace deltasync::agent {

/// No lock: it is the publisher's own.
class Arrival {
 public:
  /// Both outlive it.
  Arrival(VersionStore& versions, LeaseTable& leases) : versions_(versions), leases_(leases) {}

  /// Looks at the fill that is open. To be called whenever something in the segment may have changed.
  void follow();

 private:
  void look_for_one(const Snapshot& now);
  void give_back();

  VersionStore& versions_;
  LeaseTable& leases_;
  ServedPtr now_;                   ///< null: none
  std::vector<ServedPtr> leaving_;  ///< came to nothing; held until nobody reads them
};

}  // namespace deltasync::agent
