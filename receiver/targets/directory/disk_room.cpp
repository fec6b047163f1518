#include "receiver/targets/directory/disk_room.hpp"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>

#include "base/memory_room.hpp"

namespace deltasync {

Result<DiskSpace> disk_space(const std::filesystem::path& path) {
  struct statvfs fs {};
  int rc;
  do {
    rc = ::statvfs(path.c_str(), &fs);
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) return Error::from_errno("asking for the free space of " + path.string(), errno);
  return DiskSpace{std::uint64_t{fs.f_blocks} * fs.f_frsize, std::uint64_t{fs.f_bavail} * fs.f_frsize};
}

std::uint64_t default_disk_reserve(const DiskSpace& space) noexcept {
  return std::min<std::uint64_t>(std::uint64_t{1} << 30, space.bytes / 20);
}

Status check_disk_room(const std::filesystem::path& path, const DiskSpace& space, std::uint64_t needed_bytes,
                       std::optional<std::uint64_t> reserve_bytes) {
  const std::uint64_t reserve = reserve_bytes.value_or(default_disk_reserve(space));
  if (space.free_bytes >= reserve && space.free_bytes - reserve >= needed_bytes) return {};
  return Error(Errc::no_space,
               path.string() + ": a version needs " + bytes_for_people(needed_bytes) + ", and " +
                   bytes_for_people(reserve) + " are to stay free, but the disk has only " +
                   bytes_for_people(space.free_bytes) +
                   " left: make room there, choose another directory, or let less stay free (--disk-reserve-mib, "
                   "disk_reserve_bytes)");
}

}  // namespace deltasync
