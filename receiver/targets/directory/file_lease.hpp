// Proof that nobody has a file open or mapped: a write lease, which Linux grants only while ours is the only open
// file description of the inode (a mapping counts as one, descriptors closed or not). Of this host: readers of others
// are not seen.
#pragma once

#include <filesystem>
#include <vector>

#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

enum class FileLeaseState : std::uint8_t {
  held,         ///< nobody else has any of the files open or mapped, and who opens one now waits for us
  in_use,       ///< somebody has
  unsupported,  ///< this filesystem cannot tell, or other hosts may read it by NFS from this one
};

/// Write leases on a set of files, with read-write descriptors. Released on destruction.
class FileLeases {
 public:
  FileLeases() = default;
  FileLeases(FileLeases&&) noexcept = default;
  FileLeases& operator=(FileLeases&&) noexcept = default;
  ~FileLeases() { release(); }

  /// All or none. The state says which; errors are those of opening the files.
  static Result<FileLeaseState> acquire(const std::vector<std::filesystem::path>& paths, FileLeases& out);

  /// True as long as nobody has tried to open any of the files. Who tried waits in open() until release(), but no
  /// longer than /proc/sys/fs/lease-break-time (45 s unless changed).
  bool unbroken() const noexcept;
  /// Lets waiting openers go on. The descriptors are closed.
  void release() noexcept;
  /// Descriptors in the order of the paths.
  int fd(std::size_t index) const noexcept { return fds_[index].get(); }
  std::size_t size() const noexcept { return fds_.size(); }

 private:
  std::vector<UniqueFd> fds_;
};

}  // namespace deltasync
