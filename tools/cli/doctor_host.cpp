// The host of an agent that is to start: docs/operating/capacity.md has the formulas in prose.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>

#include "agent/descriptors.hpp"
#include "agent/options.hpp"
#include "base/fd.hpp"
#include "base/memory_room.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "format/segment.hpp"
#include "net/listener.hpp"
#include "shm/huge_pages.hpp"
#include "shm/segment.hpp"
#include "shm/segment_view.hpp"
#include "shm/side_files.hpp"
#include "shm/space.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/doctor.hpp"

namespace deltasync::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kOwnBytes = 512u << 20;  ///< of an agent, whatever it serves
constexpr std::uint64_t kHugePageBytes = 2u << 20;
constexpr std::uint64_t kContainerShmBytes = 64u << 20;  ///< of /dev/shm, unless a container is told otherwise

/// What an agent needs for the versions of a model.
struct Needs {
  std::uint64_t shared = 0;          ///< a segment, its kept deltas, and as much again while one is written
  std::uint64_t memory = kOwnBytes;  ///< shared memory included
  std::optional<Digest128> layout;
};

Result<Needs> needs_of(const std::string& model_dir) {
  if (model_dir.empty()) return Needs{};
  DS_ASSIGN(const HfModel model, HfModel::open(model_dir));
  const Layout& layout = *model.layout();
  const auto plan = shm::plan_segment(layout.half_bytes(), layout.encode().size(), model.sidecar().encode().size(),
                                      delta::make_batches(layout).size());
  if (!plan) return Error(Errc::out_of_range, model_dir + ": larger than a segment can be");
  const std::uint64_t ring = agent::default_ring_bytes(layout.half_bytes());
  Needs needs;
  needs.shared = plan->segment_bytes + 2 * ring;
  needs.memory = needs.shared + 3 * ring + kOwnBytes;
  needs.layout = layout.digest();
  return needs;
}

bool has_layout(const fs::path& segment, const std::optional<Digest128>& layout) {
  const UniqueFd opened(::open(segment.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!opened) return false;
  const auto view = shm::SegmentView::map(opened);
  return view && (*view)->layout_digest() == layout;
}

/// Of what is needed, what the agent of this name has in `dir` already. One of another layout is there until the first
/// version of this one is.
std::uint64_t bytes_in_use(const std::string& dir, const std::string& name, const Needs& needs) {
  std::uint64_t bytes = 0;
  std::error_code error;
  const auto add = [&bytes](const fs::path& file) {
    struct stat info {};
    if (::stat(file.c_str(), &info) == 0) bytes += static_cast<std::uint64_t>(info.st_blocks) * 512;
  };
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string file = it->path().filename().string();
    if (shm::agent_of_segment(file) != name || !has_layout(it->path(), needs.layout)) continue;
    add(it->path());
    for (const shm::SideFile& side : shm::find_side_files({dir, file})) add(side.path);
  }
  return std::min(bytes, needs.shared);
}

std::string with_use(std::uint64_t used) {
  return used == 0 ? "" : ", beside " + human_bytes(used) + " that an agent of this name has already";
}

Status check_directory(const std::string& dir) {
  const UniqueFd opened(::open(dir.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!opened || ::access(dir.c_str(), W_OK | X_OK) != 0) return Error::from_errno(dir, errno);
  return {};
}

Finding check_shared_memory(const AgentHost& host, std::uint64_t needed, std::uint64_t used) {
  const char* const check = "shared_memory";
  const std::string& dir = host.shm_dir;
  struct statvfs fs {};
  if (::statvfs(dir.c_str(), &fs) != 0) return bad(check, Error::from_errno(dir, errno), "another --shm-dir");
  if (auto room = shm::check_room(dir, needed - used); !room) {
    return bad(check, room.error(),
               "make it larger (mount -o remount,size=…; --shm-size of a container), or give another --shm-dir");
  }
  const std::uint64_t bytes = static_cast<std::uint64_t>(fs.f_blocks) * fs.f_frsize;
  std::string found = dir + " has " + human_bytes(static_cast<std::uint64_t>(fs.f_bavail) * fs.f_frsize) + " free";
  if (needed > 0) return good(check, found + "; " + human_bytes(needed) + " are needed" + with_use(used));
  if (bytes <= kContainerShmBytes) {
    return warning(check, dir + " has " + human_bytes(bytes) + " in all, as in a container that was not told more",
                   "--shm-size of the container, a volume, or another --shm-dir");
  }
  return good(check, found + "; --model DIR tells what a model needs");
}

Finding check_huge_pages(const std::string& dir) {
  const char* const check = "huge_pages";
  if (const Status room = shm::check_room(dir, kHugePageBytes); !room)
    return warning(check, "not tried: " + room.error().message(), "make room there, then ask again");
  const auto made = shm::try_huge_page(dir);
  if (made) return good(check, "files in " + dir + " get them");
  const char* remedy = "nothing has to be done: copies and diffs are slower without";
  if (made.error().code() == Errc::unsupported) remedy = "Linux 6.1 or later, and a --shm-dir in memory (tmpfs)";
  if (made.error().code() == Errc::no_space)
    remedy = "free memory before the agent starts: echo 1 > /proc/sys/vm/compact_memory";
  return warning(check, made.error().message() + "; copies and diffs are slower without", remedy);
}

Finding check_memory(std::uint64_t needed, std::uint64_t used) {
  if (auto room = check_memory_room(needed - used); !room) {
    return bad("memory", room.error(),
               "raise the limit of memory, which counts shared memory too, or use a larger machine");
  }
  return good("memory",
              "at least " + human_bytes(needed) + " for an agent, shared memory included, are there" + with_use(used));
}

Finding check_open_files(const std::optional<std::size_t>& receivers_max) {
  const char* const check = "open_files";
  agent::AgentOptions options;
  agent::AdmissionLimits& limits = options.pull.limits.admission;
  if (receivers_max) limits.receivers_max = limits.data_max = *receivers_max;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0)
    return bad(check, Error::from_errno("the limit of open files", errno), "ulimit -n says it");
  const std::uint64_t needed = agent::descriptors_needed(options);
  const std::string raise = "raise the hard limit: ulimit -Hn " + std::to_string(needed) +
                            ", or LimitNOFILE=" + std::to_string(needed) + " of the unit";
  if (needed <= limit.rlim_max) {
    return good(check, std::to_string(limit.rlim_max) + " may be open, " + std::to_string(needed) + " are needed for " +
                           std::to_string(limits.receivers_max) + " receivers");
  }
  auto fits = agent::fit_connections(limit.rlim_max, receivers_max.has_value(), options);
  if (!fits) return bad(check, fits.error(), raise);
  return warning(check,
                 std::to_string(limit.rlim_max) + " may be open: no more than " + std::to_string(limits.receivers_max) +
                     " receivers are let in",
                 raise);
}

Finding check_port(const std::string& listen, bool knows_peers) {
  const char* const check = "port";
  const auto where = net::parse_endpoint(listen);
  if (!where) return bad(check, where.error(), "--listen HOST:PORT");
  const auto bound = net::Listener::bind(*where, knows_peers);
  if (bound) return good(check, listen + " is free");
  const char* remedy = "give an address of this host, and a port from 1024 on";
  if (bound.error().code() == Errc::already_exists)
    remedy = "end what listens there (ss -ltnp names it), or take another port";
  if (bound.error().code() == Errc::unauthenticated) remedy = "--token-file, or TLS with --tls-ca";
  return bad(check, bound.error(), remedy);
}

}  // namespace

std::vector<Finding> check_agent_host(const AgentHost& host) {
  std::vector<Finding> findings;
  const auto needs = needs_of(host.model);
  if (needs) {
    const std::uint64_t used = bytes_in_use(host.shm_dir, host.name, *needs);
    if (const Status usable = check_directory(host.shm_dir); usable) {
      findings.push_back(check_shared_memory(host, needs->shared, used));
      findings.push_back(check_huge_pages(host.shm_dir));
    } else {
      findings.push_back(
          bad("shared_memory", usable.error(), "name a directory that this user may write to with --shm-dir"));
    }
    findings.push_back(check_memory(needs->memory, used));
  } else {
    findings.push_back(bad("model", needs.error(), "name a directory with config.json and *.safetensors"));
  }
  findings.push_back(check_open_files(host.receivers_max));
  if (!host.listen.empty()) {
    findings.push_back(check_port(host.listen, !host.access.token_file.empty() || !host.access.tls.ca.empty()));
  }
  for (Finding& finding : check_access(host.access, AccessSide::server)) findings.push_back(std::move(finding));
  return findings;
}

}  // namespace deltasync::cli
