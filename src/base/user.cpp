#include "base/user.hpp"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>

namespace deltasync {

std::string describe_user(uid_t uid) {
  const std::string number = "user " + std::to_string(uid);
  passwd entry{};
  passwd* found = nullptr;
  std::array<char, 4096> text{};
  if (::getpwuid_r(uid, &entry, text.data(), text.size(), &found) != 0 || found == nullptr) return number;
  return number + " (" + found->pw_name + ")";
}

std::string describe_stranger(const std::filesystem::path& file) {
  struct stat found {};
  if (::lstat(file.c_str(), &found) != 0 || found.st_uid == ::geteuid()) return {};
  return " (it belongs to " + describe_user(found.st_uid) + ")";
}

}  // namespace deltasync
