#include "base/runtime_dir.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "base/user.hpp"

namespace deltasync {
namespace {

namespace fs = std::filesystem;

/// Nobody else can put anything into it or rename what is there.
bool is_own(const fs::path& dir) {
  struct stat found {};
  return ::stat(dir.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == ::geteuid() &&
         (found.st_mode & 022) == 0;
}

std::vector<fs::path> candidates() {
  const std::string uid = std::to_string(::geteuid());
  std::vector<fs::path> dirs;
  const char* xdg = std::getenv("XDG_RUNTIME_DIR");
  if (xdg != nullptr && *xdg == '/' && is_own(xdg)) dirs.push_back(fs::path(xdg) / "deltasync");
  const fs::path usual = fs::path("/run/user") / uid;
  if (is_own(usual)) dirs.push_back(usual / "deltasync");
  dirs.push_back("/tmp/deltasync-" + uid);  // /tmp is sticky: nobody else renames or removes it
  return dirs;
}

/// That it is this user's alone. Who may write beside it cannot change what this has seen.
Status check(const fs::path& dir) {
  const std::string what = "runtime directory " + dir.string();
  struct stat found {};
  if (::lstat(dir.c_str(), &found) != 0) return Error::from_errno(what, errno);
  const std::string remedy = ": remove it, or set XDG_RUNTIME_DIR to a directory of your own";
  if (found.st_uid != ::geteuid()) {
    return Error(Errc::permission, what + " belongs to " + describe_user(found.st_uid) + ", not to " +
                                       describe_user(::geteuid()) + remedy);
  }
  if (!S_ISDIR(found.st_mode)) return Error(Errc::already_exists, what + " is not a directory" + remedy);
  if ((found.st_mode & 077) != 0) {
    return Error(Errc::permission, what + " is open to others: make it mode 0700, or set XDG_RUNTIME_DIR to another");
  }
  return {};
}

}  // namespace

Result<fs::path> make_runtime_dir() {
  Error last(Errc::not_found, "no runtime directory");
  for (const fs::path& dir : candidates()) {
    if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) {
      last = Error::from_errno("make runtime directory " + dir.string(), errno);
      continue;
    }
    Status good = check(dir);
    if (good) return dir;
    last = std::move(good).error();
  }
  return last;
}

std::vector<fs::path> find_runtime_dirs() {
  std::vector<fs::path> found;
  for (fs::path& dir : candidates()) {
    if (check(dir)) found.push_back(std::move(dir));
  }
  return found;
}

}  // namespace deltasync
