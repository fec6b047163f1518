#include "shm/space.hpp"

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

namespace deltasync::shm {

int reserve_pages(std::uint64_t bytes, const std::function<int(std::uint64_t, std::uint64_t)>& allocate) {
  for (std::uint64_t at = 0; at < bytes; at += kReserveBytes) {
    int error = EINTR;
    while (error == EINTR) error = allocate(at, std::min(kReserveBytes, bytes - at));
    if (error != 0) return error;
  }
  return 0;
}

Status check_room(const std::filesystem::path& dir, std::uint64_t needed_bytes, const CgroupFiles& cgroup) {
  struct statvfs fs {};
  if (::statvfs(dir.c_str(), &fs) != 0) return Error::from_errno(dir.string(), errno);
  const auto free_bytes = static_cast<std::uint64_t>(fs.f_bavail) * fs.f_frsize;
  if (free_bytes < needed_bytes) {
    return Error(Errc::no_space, dir.string() + " has " + bytes_for_people(free_bytes) + " free, " +
                                     bytes_for_people(needed_bytes) + " are needed");
  }
  struct statfs kind {};
  if (::statfs(dir.c_str(), &kind) != 0) return Error::from_errno(dir.string(), errno);
  if (kind.f_type != TMPFS_MAGIC) return {};  // file pages can be written back: no cgroup limit to fear
  std::ifstream in(cgroup.self);
  std::ostringstream text;
  text << in.rdbuf();
  const auto room = cgroup_room_bytes(cgroup.root, text.str());
  if (room && *room < needed_bytes) {
    return Error(Errc::no_space, "the memory cgroup has " + bytes_for_people(*room) + " left, files in " +
                                     dir.string() + " need " + bytes_for_people(needed_bytes));
  }
  return {};
}

}  // namespace deltasync::shm
