// A version as one safetensors file, the way of systems whose engines load a directory: saved whole for each version,
// and read whole. By all threads, and without a flush to the disk: that favours it.
#pragma once

#include <filesystem>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::bench {

class WholeFile {
 public:
  /// Writes all tensors of a half of this layout into a new file in `directory`. It has no name any more: nothing stays
  /// behind. no_space, io: the path is named.
  static Result<WholeFile> save(const Layout& layout, ByteSpan half, const std::filesystem::path& directory,
                                ThreadPool& pool);
  /// Reads all tensors to where they lie in a half. corrupt if the file is of another layout, or cut short.
  Status load(const Layout& layout, MutByteSpan half, ThreadPool& pool) const;
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  WholeFile(UniqueFd fd, std::filesystem::path path, std::uint64_t bytes)
      : fd_(std::move(fd)), path_(std::move(path)), bytes_(bytes) {}

  UniqueFd fd_;
  std::filesystem::path path_;  ///< that it had, for messages
  std::uint64_t bytes_;
};

}  // namespace deltasync::bench
