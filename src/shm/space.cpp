#include "shm/space.hpp"

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace deltasync::shm {
namespace {

std::optional<std::uint64_t> read_number(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string text;
  if (!(in >> text)) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;  // "max" among others
  return value;
}

/// Page cache of the group that is not in use: freed by the kernel before the limit bites.
std::uint64_t reclaimable(const std::filesystem::path& group) {
  std::ifstream in(group / "memory.stat");
  std::string key;
  std::uint64_t value = 0;
  while (in >> key >> value) {
    if (key == "inactive_file") return value;
  }
  return 0;
}

}  // namespace

std::optional<std::uint64_t> cgroup_room_bytes(const std::filesystem::path& cgroup_root,
                                               std::string_view proc_self_cgroup) {
  std::istringstream lines{std::string(proc_self_cgroup)};
  std::string line;
  std::optional<std::uint64_t> room;
  while (std::getline(lines, line)) {
    if (line.rfind("0::/", 0) != 0) continue;  // the v2 hierarchy
    auto relative = std::filesystem::path(line.substr(4)).lexically_normal();
    for (;; relative = relative.parent_path()) {
      const auto group = cgroup_root / relative;
      const auto limit = read_number(group / "memory.max");
      const auto used = read_number(group / "memory.current");
      if (limit && used) {
        const auto busy = *used - std::min(*used, reclaimable(group));
        const auto here = *limit > busy ? *limit - busy : 0;
        room = room ? std::min(*room, here) : here;
      }
      if (relative.empty() || relative == ".") break;
    }
  }
  return room;
}

std::string bytes_for_people(std::uint64_t bytes) {
  std::array<char, 64> text{};
  const double gib = static_cast<double>(bytes) / (1u << 30);
  if (gib >= 1) {
    std::snprintf(text.data(), text.size(), "%.2f GiB", gib);
  } else {
    std::snprintf(text.data(), text.size(), "%.2f MiB", static_cast<double>(bytes) / (1u << 20));
  }
  return std::string(text.data()) + " (" + std::to_string(bytes) + " bytes)";
}

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
    return Error(Errc::no_space, dir.string() + " has " + bytes_for_people(free_bytes) + " free, the segment needs " +
                                     bytes_for_people(needed_bytes));
  }
  struct statfs kind {};
  if (::statfs(dir.c_str(), &kind) != 0) return Error::from_errno(dir.string(), errno);
  if (kind.f_type != TMPFS_MAGIC) return {};  // file pages can be written back: no cgroup limit to fear
  std::ifstream in(cgroup.self);
  std::ostringstream text;
  text << in.rdbuf();
  const auto room = cgroup_room_bytes(cgroup.root, text.str());
  if (room && *room < needed_bytes) {
    return Error(Errc::no_space, "the memory cgroup has " + bytes_for_people(*room) + " left, the segment in " +
                                     dir.string() + " needs " + bytes_for_people(needed_bytes));
  }
  return {};
}

}  // namespace deltasync::shm
