// Whether a name still leads to a file that is open. Cleaners remove names, and others may take them.
#pragma once

#include <sys/stat.h>

#include <filesystem>

namespace deltasync {

/// `name` itself, not what it links to, is the very file that `fd` has open.
inline bool is_name_of(const std::filesystem::path& name, int fd) {
  struct stat open {};
  struct stat named {};
  return ::fstat(fd, &open) == 0 && ::lstat(name.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

}  // namespace deltasync
