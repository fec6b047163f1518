#include "agent/descriptors.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/log.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kOwn = 256;       ///< segments, processes that are watched, the event loop, files
constexpr std::uint64_t kOfStranger = 2;  ///< one that had to leave may be there still when the next has come
constexpr std::uint64_t kOfUcx = 12;      ///< a worker of libucp's, besides the connection's own
constexpr std::uint64_t kOfTrainer = 4;   ///< its socket and three pidfds

std::uint64_t of_receivers(const AdmissionLimits& limits) {
  return limits.receivers_max + limits.data_max;
}

}  // namespace

std::uint64_t descriptors_needed(const AgentOptions& options) {
  const AdmissionLimits& limits = options.pull.limits.admission;
  const std::uint64_t over_ucx = options.pull.ucx ? kOfUcx * options.pull.limits.ucx_connections_max : 0;
  return kOwn + of_receivers(limits) + over_ucx + kOfStranger * limits.strangers_max +
         kOfTrainer * options.trainer.connections_max + (options.http ? options.http->connections_max : 0);
}

Status fit_connections(std::uint64_t descriptors, bool asked, AgentOptions& options) {
  AdmissionLimits& limits = options.pull.limits.admission;
  const std::uint64_t needed = descriptors_needed(options);
  if (needed <= descriptors) return {};
  if (asked) {
    const std::uint64_t others = needed - of_receivers(limits);
    const std::uint64_t possible = descriptors > others ? (descriptors - others) / 2 : 0;
    return Error(Errc::invalid_argument,
                 "--receivers-max " + std::to_string(limits.receivers_max) + " needs " + std::to_string(needed) +
                     " open files, and this process may have " + std::to_string(descriptors) +
                     ": raise the limit (ulimit -n " + std::to_string(needed) + "), or ask for " +
                     (possible > 0 ? "at most " + std::to_string(possible) : std::string("fewer")));
  }
  const std::uint64_t left = descriptors - std::min(kOwn, descriptors / 2);
  const auto at_most = [left](std::size_t& connections, std::uint64_t part) {
    connections = static_cast<std::size_t>(std::clamp<std::uint64_t>(left / part, 1, connections));
  };
  at_most(limits.receivers_max, 4);
  at_most(limits.data_max, 4);
  at_most(limits.strangers_max, 16);
  at_most(options.trainer.connections_max, 16);
  if (options.pull.ucx) at_most(options.pull.limits.ucx_connections_max, 4 * kOfUcx);
  if (options.http) at_most(options.http->connections_max, 16);
  log::warn("few_open_files allowed={} receivers_max={} remedy=\"ulimit -n {}\"", descriptors, limits.receivers_max,
            needed);
  return {};
}

Status fit_connections(bool asked, AgentOptions& options) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return Error::from_errno("the limit of open files", errno);
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0 && ::getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return Error::from_errno("the limit of open files", errno);
  }
  return fit_connections(limit.rlim_cur, asked, options);
}

}  // namespace deltasync::agent
