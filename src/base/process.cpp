#include "base/process.hpp"

#include <poll.h>
#include <sys/syscall.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>

namespace deltasync {
namespace {

/// Start time of a process, or 0 if it does not exist.
std::uint64_t start_ticks_of(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(in, line)) return 0;
  const auto paren = line.rfind(')');  // the command name may contain anything but ends at the last ')'
  if (paren == std::string::npos) return 0;
  std::istringstream fields(line.substr(paren + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) {
    if (!(fields >> field)) return 0;
  }
  std::uint64_t ticks = 0;
  std::from_chars(field.data(), field.data() + field.size(), ticks);
  return ticks;
}

}  // namespace

ProcessId ProcessId::self() {
  return {::getpid(), start_ticks_of(::getpid())};
}

Result<ProcessId> ProcessId::of(pid_t pid) {
  const auto ticks = start_ticks_of(pid);
  if (ticks == 0) return Error(Errc::not_found, "pid " + std::to_string(pid) + " does not exist");
  return ProcessId{pid, ticks};
}

std::string to_string(const ProcessId& id) {
  return "pid " + std::to_string(id.pid);
}

Result<ProcessWatch> ProcessWatch::open(const ProcessId& id) {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, id.pid, 0)));
  if (!fd) {
    if (errno == ESRCH || errno == EINVAL) return Error(Errc::peer_died, to_string(id) + " is gone");
    return Error::from_errno("pidfd_open of " + to_string(id), errno);
  }
  // The pidfd is of whoever has the pid now: it is ours only if the start time still fits.
  if (start_ticks_of(id.pid) != id.start_ticks) return Error(Errc::peer_died, to_string(id) + " is gone (pid reused)");
  return ProcessWatch(id, std::move(fd));
}

bool ProcessWatch::dead() const {
  pollfd p{fd_.get(), POLLIN, 0};
  return ::poll(&p, 1, 0) == 1;
}

bool proved_dead(const ProcessId& id) {
  auto watch = ProcessWatch::open(id);
  return watch ? watch->dead() : watch.error().code() == Errc::peer_died;
}

}  // namespace deltasync
