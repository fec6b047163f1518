// How much shared memory may still be taken, found out before anything is reserved or mapped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "base/memory_room.hpp"
#include "deltasync/result.hpp"

namespace deltasync::shm {

using deltasync::bytes_for_people;
using deltasync::cgroup_room_bytes;
using deltasync::CgroupFiles;

/// no_space, with what is needed and what is there, if the file system of `dir` (or, where files live in memory, the
/// cgroup) cannot take `needed_bytes` more.
Status check_room(const std::filesystem::path& dir, std::uint64_t needed_bytes, const CgroupFiles& cgroup = {});

/// Reserves [0, bytes) by `allocate(offset, bytes)`, which returns an errno as posix_fallocate does; returns the first
/// one that is not EINTR, or 0. In pieces, since the kernel gives up a whole call at a signal: a process with a
/// profiling timer would never get through one large call.
int reserve_pages(std::uint64_t bytes, const std::function<int(std::uint64_t offset, std::uint64_t bytes)>& allocate);
inline constexpr std::uint64_t kReserveBytes = std::uint64_t{16} << 20;  ///< of one piece

}  // namespace deltasync::shm
