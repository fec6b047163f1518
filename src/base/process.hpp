// Who a process is, and proof that it has died. A closed socket is no proof (a forked child may keep it open, a
// stopped process keeps everything); a pidfd that polls readable is.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// A process that cannot be confused with a later one of the same pid.
struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  ///< field 22 of /proc/PID/stat

  bool operator==(const ProcessId&) const = default;
  static ProcessId self();
  /// not_found if no such process; io if /proc cannot tell (no descriptor left, for example).
  static Result<ProcessId> of(pid_t pid);
};
std::string to_string(const ProcessId& id);  ///< "pid 1234"

/// Holds a pidfd of one process.
class ProcessWatch {
 public:
  /// peer_died if the process is gone already or the pid belongs to another process by now. Any other error proves
  /// nothing: the process counts as alive.
  static Result<ProcessWatch> open(const ProcessId& id);

  /// True once the process is proved dead (a zombie counts: it runs no more instruction).
  bool dead() const;
  /// For poll/epoll: readable when dead.
  int fd() const noexcept { return fd_.get(); }
  const ProcessId& id() const noexcept { return id_; }

 private:
  ProcessWatch(ProcessId id, UniqueFd fd) : id_(id), fd_(std::move(fd)) {}
  ProcessId id_;
  UniqueFd fd_;
};

/// True if the process is proved dead or was never that process; false if that cannot be found out. A process in
/// another PID namespace cannot be seen and reads as dead: keep a ProcessWatch opened while it was connected instead.
bool proved_dead(const ProcessId& id);
/// True if it is known to be stopped: by a signal, or a debugger.
bool is_stopped(const ProcessId& id);

}  // namespace deltasync
