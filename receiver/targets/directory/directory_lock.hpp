// One owner of a directory at a time, across processes and inside one. Ends with the process, however it ends.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

class DirectoryLock {
 public:
  /// In each directory that a target keeps, or has kept.
  static constexpr const char* kFileName = ".deltasync.lock";

  /// already_exists, naming the holder's pid, if somebody owns the directory.
  static Result<DirectoryLock> acquire(const std::filesystem::path& directory);

  DirectoryLock(DirectoryLock&& other) noexcept : fd_(std::move(other.fd_)), key_(std::exchange(other.key_, {})) {}
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock();

 private:
  DirectoryLock(UniqueFd fd, std::string key) : fd_(std::move(fd)), key_(std::move(key)) {}
  UniqueFd fd_;
  std::string key_;
};

}  // namespace deltasync
