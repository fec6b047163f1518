#include "agent/plans/subset_table.hpp"

#include <iterator>
#include <string>
#include <utility>

namespace deltasync::agent {

Result<SubsetPtr> SubsetTable::share(TileSet tiles) {
  const std::lock_guard lock(mutex_);
  for (auto known = subsets_.begin(); known != subsets_.end();) {
    const SubsetPtr subset = known->second.lock();
    if (subset && known->first == tiles.digest()) return subset;
    known = subset ? std::next(known) : subsets_.erase(known);
  }
  const std::uint64_t bytes = Subset::range_bytes(tiles);
  auto share = room_.take_first(bytes);  // its holder will wait for answers
  if (!share) {
    return Error(Errc::no_space, "this subscription takes " + std::to_string(bytes) + " bytes, and of the " +
                                     std::to_string(room_.bytes_max()) +
                                     " that the agent holds for its peers (--peer-memory-mib) " +
                                     std::to_string(room_.bytes_taken()) + " are taken");
  }
  const Digest128 digest = tiles.digest();
  auto made = std::make_shared<Subset>(std::move(tiles), *std::move(share));
  subsets_[digest] = made;
  return made;
}

}  // namespace deltasync::agent
