#include "writer/orphaned_copies.hpp"

#include <mutex>
#include <utility>
#include <vector>

#include "base/fork_guard.hpp"

namespace deltasync {
namespace {

struct Beach {
  ForkGuard fork_guard;
  std::mutex mutex;
  std::vector<OrphanedCopies> all;  // protected by mutex
};

/// Never destroyed: a device may write until the process is gone.
Beach& beach() {
  static auto* const made = new Beach;
  return *made;
}

}  // namespace

void keep_orphaned(OrphanedCopies what) {
  Beach& here = beach();
  if (!here.fork_guard.same_process()) {
    static_cast<void>(
        new OrphanedCopies(std::move(what)));  // the mutex may have been locked when this process was forked
    return;
  }
  const std::lock_guard lock(here.mutex);
  here.all.push_back(std::move(what));
}

void sweep_orphaned_copies() {
  Beach& here = beach();
  if (!here.fork_guard.same_process()) return;  // a forked child: neither the mappings nor the devices are its own
  std::vector<OrphanedCopies> done;             // freed without the lock: claims have one of their own
  const std::lock_guard lock(here.mutex);
  for (std::size_t i = 0; i < here.all.size();) {
    if (here.all[i].copy_streams->settle(Deadline::after(std::chrono::nanoseconds(0)))) {
      done.push_back(std::move(here.all[i]));
      here.all.erase(here.all.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

}  // namespace deltasync
