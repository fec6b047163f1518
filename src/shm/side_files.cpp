#include "shm/side_files.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace deltasync::shm {
namespace {

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_there(const std::filesystem::path& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

bool is_own_file(const std::filesystem::path& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == ::geteuid();
}

}  // namespace

std::optional<std::string> agent_of_segment(const std::string& name) {
  const auto dot = name.rfind(".g");
  if (dot == std::string::npos || dot == 0 || !is_number(std::string_view(name).substr(dot + 2))) return std::nullopt;
  return name.substr(0, dot);
}

std::filesystem::path side_file_path(const SegmentPath& segment, std::uint64_t number) {
  return segment.dir / (segment.name + ".d" + std::to_string(number));
}

std::vector<SideFile> find_side_files(const SegmentPath& segment) {
  std::vector<SideFile> found;
  const std::string prefix = segment.name + ".d";
  std::error_code error;
  for (std::filesystem::directory_iterator it(segment.dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    SideFile file;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), file.number);
    file.path = side_file_path(segment, file.number);
    if (file.path.filename() == name) found.push_back(std::move(file));
  }
  std::sort(found.begin(), found.end(), [](const SideFile& a, const SideFile& b) { return a.number < b.number; });
  return found;
}

Result<std::vector<StraySideFile>> find_stray_side_files(const std::filesystem::path& dir) {
  std::vector<StraySideFile> found;
  std::error_code error;
  for (std::filesystem::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const auto dot = name.rfind(".d");
    if (dot == std::string::npos || !is_number(std::string_view(name).substr(dot + 2))) continue;
    const std::string segment = name.substr(0, dot);
    auto agent_name = agent_of_segment(segment);
    if (!agent_name || is_there(dir / segment) || !is_own_file(it->path())) continue;
    found.push_back({*std::move(agent_name), it->path()});
  }
  if (error) return Error::from_errno("segment directory " + dir.string(), error.value());
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return found;
}

void remove_side_files(const SegmentPath& segment) noexcept {
  try {
    for (const SideFile& file : find_side_files(segment)) ::unlink(file.path.c_str());
  } catch (const std::exception&) {  // no memory for their names: they stay, and the next agent ignores them
  }
}

}  // namespace deltasync::shm
