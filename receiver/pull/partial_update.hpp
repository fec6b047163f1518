// What a full pull holds so far: some tiles of an open full update, each verified, all of one version (but for those
// that a pull which ended in the middle of a step had already advanced: the next plan finds out by their digests). It
// survives a revoked lease, an agent's restart and a pull that had too little time.
#pragma once

#include <cstdint>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"

namespace deltasync::receiver {

struct PartialUpdate {
  bool open = false;                   ///< the target has a full update open
  VersionId version;                   ///< of the tiles that we have
  Digest128 root;                      ///< of that whole version
  std::vector<std::uint8_t> have;      ///< per tile: 1 = its bytes have digests[tile]
  std::vector<std::uint64_t> digests;  ///< per tile; meaningless where have is 0

  bool any() const noexcept {
    if (!open || !version.valid()) return false;
    for (const std::uint8_t h : have) {
      if (h != 0) return true;
    }
    return false;
  }
};

}  // namespace deltasync::receiver
