// How much shared memory may still be taken, found out before anything is reserved or mapped.
#pragma once

#include <cstdint>
#include <filesystem>
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

/// no_space, with what is needed and what is there, if the file system of `dir` (or, where files live in memory, the
/// cgroup) cannot take `needed_bytes` more.
Status check_room(const std::filesystem::path& dir, std::uint64_t needed_bytes);

/// "1.50 GiB (1610612736 bytes)"
std::string bytes_for_people(std::uint64_t bytes);

}  // namespace deltasync::shm
