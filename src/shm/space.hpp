// How much shared memory may still be taken, found out before anything is reserved or mapped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"

namespace deltasync::shm {

/// Room left under a cgroup v2 memory limit: the tightest of the process's own group and all groups above it, page
/// cache that the kernel would give back counted as room. Nothing if there is no limit or no cgroup v2.
/// `cgroup_root` is normally /sys/fs/cgroup, `proc_self_cgroup` the text of /proc/self/cgroup.
std::optional<std::uint64_t> cgroup_room_bytes(const std::filesystem::path& cgroup_root,
                                               std::string_view proc_self_cgroup);

/// Where the system says what groups there are, and which one this process is in.
struct CgroupFiles {
  std::filesystem::path root = "/sys/fs/cgroup";
  std::filesystem::path self = "/proc/self/cgroup";
};

/// no_space, with what is needed and what is there, if the file system of `dir` (or, where files live in memory, the
/// cgroup) cannot take `needed_bytes` more.
Status check_room(const std::filesystem::path& dir, std::uint64_t needed_bytes, const CgroupFiles& cgroup = {});

/// Reserves [0, bytes) by `allocate(offset, bytes)`, which returns an errno as posix_fallocate does; returns the first
/// one that is not EINTR, or 0. In pieces, since the kernel gives up a whole call at a signal: a process with a
/// profiling timer would never get through one large call.
int reserve_pages(std::uint64_t bytes, const std::function<int(std::uint64_t offset, std::uint64_t bytes)>& allocate);
inline constexpr std::uint64_t kReserveBytes = std::uint64_t{16} << 20;  ///< of one piece

/// "1.50 GiB (1610612736 bytes)"
std::string bytes_for_people(std::uint64_t bytes);

}  // namespace deltasync::shm
