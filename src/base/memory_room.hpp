// How much memory this process may still take, found out before it is taken: beyond the limit of a cgroup there is no
// error, but a kill.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"

namespace deltasync {

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

/// no_space, with what is needed and what is there, if the cgroup or the machine (MemAvailable in `meminfo`) has not
/// `needed_bytes` of memory left.
Status check_memory_room(std::uint64_t needed_bytes, const CgroupFiles& cgroup = {},
                         const std::filesystem::path& meminfo = "/proc/meminfo");

/// "1.50 GiB (1610612736 bytes)"
std::string bytes_for_people(std::uint64_t bytes);

}  // namespace deltasync
