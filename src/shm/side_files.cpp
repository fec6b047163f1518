#include "shm/side_files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/fd.hpp"
#include "shm/space.hpp"

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

Status write_all(int fd, ByteSpan bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Error::from_errno("write " + path.string(), errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

}  // namespace

Status write_side_file(const std::filesystem::path& path, std::span<const ByteSpan> pieces, std::uint64_t reserve,
                       const std::function<bool()>& over) {
  std::uint64_t bytes = reserve;
  for (const ByteSpan piece : pieces) bytes += piece.size();
  DS_TRY(check_room(path.parent_path(), bytes));
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return Error::from_errno("create " + path.string(), errno);
  Status status;
  for (const ByteSpan piece : pieces) {
    status = over && over() ? Status(Error(Errc::cancelled, "the agent ends")) : write_all(fd.get(), piece, path);
    if (!status) break;
  }
  if (!status) ::unlink(path.c_str());
  return status;
}

Result<MappedFile> open_side_file(const std::filesystem::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return Error::from_errno("look at " + path.string(), errno);
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) {
    return Error(Errc::permission, path.string() + " is no regular file of this user");
  }
  return MappedFile::open(path);
}

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
