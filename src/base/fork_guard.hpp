// After fork() the child has copies of the parent's objects, but neither their threads nor mappings that are not
// inherited; and what they say over a socket is said in the parent's name. An object with such things remembers where
// it was made, and its destructor does nothing of the kind anywhere else.
#pragma once

#include <sys/types.h>

#include <atomic>

namespace deltasync {

/// This process, without a system call: fork() changes it in the child. One that was made by vfork(), _Fork() or a bare
/// clone() takes itself for its parent.
class OwnPid {
 public:
  static pid_t get() noexcept {
    const pid_t known = known_.load(std::memory_order_relaxed);
    return known != 0 ? known : look();
  }

 private:
  static pid_t look() noexcept;
  static inline std::atomic<pid_t> known_{0};
};

class ForkGuard {
 public:
  bool same_process() const noexcept { return pid_ == OwnPid::get(); }
  pid_t pid() const noexcept { return pid_; }

 private:
  pid_t pid_ = OwnPid::get();
};

}  // namespace deltasync
