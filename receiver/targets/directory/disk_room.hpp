// Whether a disk has room for a version, found out before a byte of it is written: what fills a disk to its end stops
// others who write there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "deltasync/result.hpp"

namespace deltasync {

struct DiskSpace {
  std::uint64_t bytes = 0;       ///< of the whole file system
  std::uint64_t free_bytes = 0;  ///< that this user may still take
};
/// Of the file system that `path`, which exists, is on.
Result<DiskSpace> disk_space(const std::filesystem::path& path);

/// What stays free unless the user says otherwise: 5 % of the file system, 1 GiB at most.
std::uint64_t default_disk_reserve(const DiskSpace& space) noexcept;

/// no_space unless `needed_bytes` more leave the reserve free. The message has the path, all three sizes, and the
/// remedy.
Status check_disk_room(const std::filesystem::path& path, const DiskSpace& space, std::uint64_t needed_bytes,
                       std::optional<std::uint64_t> reserve_bytes);

}  // namespace deltasync
