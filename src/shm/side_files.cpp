#include "shm/side_files.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <string>
#include <system_error>

namespace deltasync::shm {

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

void remove_side_files(const SegmentPath& segment) noexcept {
  try {
    for (const SideFile& file : find_side_files(segment)) ::unlink(file.path.c_str());
  } catch (const std::exception&) {  // no memory for their names: they stay, and the next agent ignores them
  }
}

}  // namespace deltasync::shm
