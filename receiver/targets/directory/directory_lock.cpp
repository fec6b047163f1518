// A POSIX record lock, because the kernel drops it when the process dies and a forked child does not inherit it (a
// flock or a lock file would outlive us in a child). Its price: it does not keep out a second owner in the same
// process, and any close of the file drops it; so the process keeps a table of what it holds and asks that first.
#include "receiver/targets/directory/directory_lock.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

#include "receiver/targets/directory/hf_files.hpp"

namespace deltasync {
namespace {

std::mutex held_mutex;
std::set<std::string>& held() {  // protected by held_mutex; device:inode of each directory
  static std::set<std::string> keys;
  return keys;
}

Result<std::string> key_of(const std::filesystem::path& directory) {
  struct stat st {};
  if (stat(directory.c_str(), &st) != 0) return file_error("looking at", directory, errno);
  return std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino);
}

struct flock whole_file() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

}  // namespace

Result<DirectoryLock> DirectoryLock::acquire(const std::filesystem::path& directory) {
  DS_ASSIGN(std::string key, key_of(directory));
  const std::lock_guard guard(held_mutex);
  if (held().count(key) != 0) {
    return Error(Errc::already_exists, directory.string() + " is kept by another target of this process");
  }
  const std::filesystem::path path = directory / kFileName;
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fd) return file_error("opening", path, errno);
  struct flock lock = whole_file();
  if (fcntl(fd.get(), F_SETLK, &lock) != 0) {
    if (errno != EAGAIN && errno != EACCES) return file_error("locking", path, errno);
    struct flock holder = whole_file();
    fcntl(fd.get(), F_GETLK, &holder);
    return Error(Errc::already_exists,
                 directory.string() + " is kept by another receiver (pid " + std::to_string(holder.l_pid) + ")");
  }
  held().insert(key);
  return DirectoryLock(std::move(fd), std::move(key));
}

DirectoryLock::~DirectoryLock() {
  if (key_.empty()) return;
  const std::lock_guard guard(held_mutex);
  fd_.reset();
  held().erase(key_);
}

}  // namespace deltasync
