// Small file operations of the HF directory target: each error names the path, and a full disk is no_space before
// anything is mapped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

#include "base/bytes.hpp"
#include "base/call_context.hpp"
#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// Error::from_errno, with the path in the message; a file size limit counts as no_space too.
Error file_error(const char* what, const std::filesystem::path& path, int errnum);

/// Creates a file that must not exist (mode 0644 less umask), with all its blocks reserved. On error, timed_out and
/// cancelled included, it is removed.
Result<UniqueFd> create_reserved(const std::filesystem::path& path, std::uint64_t bytes, const CallContext& until);
/// Opens for reading or for both. A symbolic link is not followed.
Result<UniqueFd> open_file(const std::filesystem::path& path, bool writable);
Result<std::uint64_t> file_bytes(int fd, const std::filesystem::path& path);

Status read_at(int fd, std::uint64_t offset, MutByteSpan to, const std::filesystem::path& path);
Status write_at(int fd, std::uint64_t offset, ByteSpan from, const std::filesystem::path& path);

/// Creates a whole file that must not exist.
Status write_new_file(const std::filesystem::path& path, ByteSpan bytes);
/// Replaces a file (or makes it) in one step: a reader sees the old bytes or the new.
Status replace_file(const std::filesystem::path& path, ByteSpan bytes);
/// Reads a whole file of at most `bytes_max` bytes (larger: corrupt).
Result<std::string> read_small_file(const std::filesystem::path& path, std::uint64_t bytes_max);
/// True if the file is a regular one with exactly these bytes.
bool file_equals(const std::filesystem::path& path, ByteSpan bytes);

/// A file's or a directory's contents to the disk; reports what an earlier write-back failed with. A filesystem that
/// knows no flush of directories is no error.
Status flush_path(const std::filesystem::path& path);

/// Removes a directory with all that is in it, or anything else: of a symbolic link, at the root too, the link and
/// nothing of what it leads to. An error of the filesystem is logged, and what cannot be removed stays.
void remove_tree(const std::filesystem::path& path) noexcept;
/// The same, file by file. timed_out or cancelled leaves the rest of it.
Status remove_tree(const std::filesystem::path& path, const CallContext& until);

Status make_directories(const std::filesystem::path& path);
Status rename_path(const std::filesystem::path& from, const std::filesystem::path& to);

/// A whole file, mapped and shared. The descriptor is closed: the mapping alone keeps the file.
class FileMapping {
 public:
  FileMapping() = default;
  static Result<FileMapping> map(int fd, std::uint64_t bytes, bool writable, const std::filesystem::path& path);
  FileMapping(FileMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  FileMapping& operator=(FileMapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~FileMapping();

  MutByteSpan bytes() const noexcept { return {data_, static_cast<std::size_t>(bytes_)}; }

 private:
  FileMapping(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace deltasync
