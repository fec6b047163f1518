// A whole file, mapped read-only.
#pragma once

#include <filesystem>
#include <memory>

#include "base/bytes.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

class MappedFile {
 public:
  /// Follows symbolic links (model caches are made of them). Errors name the path: not_found, permission, io,
  /// invalid_argument (not a regular file).
  static Result<MappedFile> open(const std::filesystem::path& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  ByteSpan bytes() const noexcept { return {data_, bytes_}; }

 private:
  MappedFile(const std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A whole file of at most `bytes_max` bytes, read into memory. Larger: no_space.
Result<std::vector<std::byte>> read_file(const std::filesystem::path& path, std::uint64_t bytes_max);

}  // namespace deltasync
