// Files beside a segment that are nothing without it: <segment>.d0, <segment>.d1 … They go when it goes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/result.hpp"
#include "format/mapped_file.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

struct SideFile {
  std::uint64_t number = 0;
  std::filesystem::path path;
};
/// The number of the one that a writer hands over with a version; those that an agent keeps have others.
inline constexpr std::uint64_t kHandedSideFile = 0;
/// Ascending. Whatever bears such a name, of whatever kind and owner.
std::vector<SideFile> find_side_files(const SegmentPath& segment);
std::filesystem::path side_file_path(const SegmentPath& segment, std::uint64_t number);

/// A new file, mode 0600, with these pieces one after the other, whole or not there, if it leaves room for `reserve`
/// bytes. already_exists: the name is taken; no_space; cancelled once `over()`.
Status write_side_file(const std::filesystem::path& path, std::span<const ByteSpan> pieces, std::uint64_t reserve = 0,
                       const std::function<bool()>& over = {});
/// not_found; permission: no regular file of this user.
Result<MappedFile> open_side_file(const std::filesystem::path& path);

/// One whose segment is no more: who removed that ended before it came to this.
struct StraySideFile {
  std::string agent_name;  ///< who had the segment
  std::filesystem::path path;
};
/// This user's, of segments of any agent. Under the lock of that agent nobody adds one.
Result<std::vector<StraySideFile>> find_stray_side_files(const std::filesystem::path& dir);

/// Removes them, those of other users aside.
void remove_side_files(const SegmentPath& segment) noexcept;

}  // namespace deltasync::shm
