#include "receiver/targets/directory/file_lease.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

#include "receiver/targets/directory/hf_files.hpp"

namespace deltasync {
namespace {

/// Filesystems where every open and every mapping goes through the one inode that the lease is on. Others grant leases
/// that prove nothing: overlayfs (a mapping belongs to the inode below), network and FUSE (readers elsewhere).
constexpr std::array<std::uint64_t, 7> kTrustedFilesystems = {
    EXT4_SUPER_MAGIC,  // ext2 and ext3 too
    XFS_SUPER_MAGIC,  BTRFS_SUPER_MAGIC, TMPFS_MAGIC, F2FS_SUPER_MAGIC,
    0xca451a4e,  // bcachefs
    0x2fc12fc1,  // zfs
};

/// There while the kernel serves NFS. An NFSv3 client has no file open on its server, so a lease does not see it.
constexpr const char* kNfsServer = "/proc/fs/nfs/exports";

bool lease_proves_something(int fd) {
  if (access(kNfsServer, F_OK) == 0) return false;
  struct statfs st {};
  if (fstatfs(fd, &st) != 0) return false;
  const auto type = static_cast<std::uint64_t>(static_cast<std::uint32_t>(st.f_type));
  return std::find(kTrustedFilesystems.begin(), kTrustedFilesystems.end(), type) != kTrustedFilesystems.end();
}

FileLeaseState lease_one(int fd) {
  struct stat st {};
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return FileLeaseState::in_use;
  if (st.st_nlink != 1) return FileLeaseState::in_use;  // somebody keeps it under another name: it is theirs too
  // A break would send SIGIO, which kills by default. SIGURG is ignored by default, and only until the owner is
  // cleared: from then on no signal is sent at all, a break is seen by asking.
  if (fcntl(fd, F_SETSIG, SIGURG) != 0) return FileLeaseState::unsupported;
  if (fcntl(fd, F_SETLEASE, F_WRLCK) != 0) {
    return errno == EAGAIN || errno == EBUSY ? FileLeaseState::in_use : FileLeaseState::unsupported;
  }
  fcntl(fd, F_SETOWN, 0);
  return FileLeaseState::held;
}

}  // namespace

Result<FileLeaseState> FileLeases::acquire(const std::vector<std::filesystem::path>& paths, FileLeases& out) {
  FileLeases leases;
  leases.fds_.reserve(paths.size());
  for (const std::filesystem::path& path : paths) {
    DS_ASSIGN(UniqueFd fd, open_file(path, true));
    if (!lease_proves_something(fd.get())) return FileLeaseState::unsupported;
    leases.fds_.push_back(std::move(fd));
    if (const FileLeaseState state = lease_one(leases.fds_.back().get()); state != FileLeaseState::held) return state;
  }
  out = std::move(leases);
  return FileLeaseState::held;
}

bool FileLeases::unbroken() const noexcept {
  // While a break is pending the kernel reports the lease that will be left.
  return std::all_of(fds_.begin(), fds_.end(),
                     [](const UniqueFd& fd) { return fcntl(fd.get(), F_GETLEASE) == F_WRLCK; });
}

void FileLeases::release() noexcept {
  // By name, not by close(): a forked child may hold a copy of the descriptor.
  for (const UniqueFd& fd : fds_) fcntl(fd.get(), F_SETLEASE, F_UNLCK);
  fds_.clear();
}

}  // namespace deltasync
