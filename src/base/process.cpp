#include "base/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <sstream>
#include <system_error>

namespace deltasync {
namespace {

/// Of the first thread, which started when the process did. An emulator, qemu-user, makes up /proc/PID/stat for the
/// process itself, with a start time that no other process finds there.
std::string stat_path(pid_t pid) {
  const std::string name = std::to_string(pid);
  return "/proc/" + name + "/task/" + name + "/stat";
}

/// not_found if there is no such process; any other error says nothing about it.
Result<std::string> read_stat(pid_t pid) {
  const std::string path = stat_path(pid);
  const auto failed = [&](int error) {
    if (error == ENOENT || error == ESRCH) return Error(Errc::not_found, "pid " + std::to_string(pid) + " is gone");
    return Error(Errc::io, "read " + path + ": " + std::generic_category().message(error));
  };
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return failed(errno);
  std::string text;
  std::array<char, 1024> buffer{};
  for (;;) {
    const auto got = ::read(fd.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(errno);
    if (got == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

struct Stat {
  std::string state;  ///< a letter
  std::uint64_t start_ticks = 0;
};

/// Errors as above.
Result<Stat> stat_of(pid_t pid) {
  DS_ASSIGN(const std::string text, read_stat(pid));
  // The command name may contain anything, newlines too, but ends at the last ')'.
  const auto paren = text.rfind(')');
  std::istringstream fields(paren == std::string::npos ? std::string() : text.substr(paren + 1));
  Stat stat;
  fields >> stat.state;
  std::string field;
  for (int i = 4; i <= 22; ++i) fields >> field;
  std::uint64_t& ticks = stat.start_ticks;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), ticks);
  if (!fields || error != std::errc() || end != field.data() + field.size() || ticks == 0) {
    return Error(Errc::io, stat_path(pid) + " has no start time");
  }
  return stat;
}

/// Start time of a process; errors as above.
Result<std::uint64_t> start_ticks_of(pid_t pid) {
  DS_ASSIGN(const Stat stat, stat_of(pid));
  return stat.start_ticks;
}

}  // namespace

ProcessId ProcessId::self() {
  const auto ticks = start_ticks_of(::getpid());
  return {::getpid(), ticks ? *ticks : 0};
}

Result<ProcessId> ProcessId::of(pid_t pid) {
  DS_ASSIGN(const std::uint64_t ticks, start_ticks_of(pid));
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
  // The pidfd is of the process that has the pid now: it is ours only if the start time still fits.
  ProcessWatch watch(id, std::move(fd));
  const auto ticks = start_ticks_of(id.pid);
  if (ticks && *ticks != id.start_ticks) return Error(Errc::peer_died, to_string(id) + " is gone (pid reused)");
  if (!ticks && watch.dead()) return Error(Errc::peer_died, to_string(id) + " is gone");
  if (!ticks) return ticks.error();  // the process that has the pid lives: nothing is proved
  return watch;
}

bool ProcessWatch::dead() const {
  pollfd p{fd_.get(), POLLIN, 0};
  return ::poll(&p, 1, 0) == 1;
}

bool proved_dead(const ProcessId& id) {
  auto watch = ProcessWatch::open(id);
  return watch ? watch->dead() : watch.error().code() == Errc::peer_died;
}

bool is_stopped(const ProcessId& id) {
  const auto stat = stat_of(id.pid);
  return stat && stat->start_ticks == id.start_ticks && (stat->state == "T" || stat->state == "t");
}

}  // namespace deltasync
