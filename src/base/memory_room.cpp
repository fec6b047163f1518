#include "base/memory_room.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace deltasync {
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

std::optional<std::uint64_t> available_bytes(const std::filesystem::path& meminfo) {
  std::ifstream in(meminfo);
  for (std::string line; std::getline(in, line);) {
    std::uint64_t kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lu kB", &kib) == 1) return kib << 10;
  }
  return std::nullopt;
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

Status check_memory_room(std::uint64_t needed_bytes, const CgroupFiles& cgroup, const std::filesystem::path& meminfo) {
  std::ifstream in(cgroup.self);
  std::ostringstream text;
  text << in.rdbuf();
  const auto in_group = cgroup_room_bytes(cgroup.root, text.str());
  const auto in_machine = available_bytes(meminfo);
  const auto refuse = [&](const char* who, std::uint64_t room) {
    return Error(Errc::no_space, std::string(who) + " has " + bytes_for_people(room) + " of memory left, " +
                                     bytes_for_people(needed_bytes) + " are needed");
  };
  if (in_group && *in_group < needed_bytes) return refuse("the memory cgroup", *in_group);
  if (in_machine && *in_machine < needed_bytes) return refuse("the machine", *in_machine);
  return {};
}

}  // namespace deltasync
