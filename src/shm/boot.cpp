#include "shm/boot.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/xattr.h>

#include <array>
#include <string_view>

#include "base/fd.hpp"

namespace deltasync::shm {
namespace {

constexpr const char* kAttribute = "user.deltasync.boot_id";

using BootId = std::array<char, 64>;

/// Empty if the kernel does not say.
std::string_view read_boot_id(BootId& to) noexcept {
  const UniqueFd file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  const ssize_t bytes = ::read(file.get(), to.data(), to.size());
  return {to.data(), bytes > 0 ? static_cast<std::size_t>(bytes) : 0};
}

}  // namespace

void mark_boot(int file) noexcept {
  BootId now{};
  const std::string_view id = read_boot_id(now);
  if (!id.empty()) ::fsetxattr(file, kAttribute, id.data(), id.size(), 0);
}

bool is_of_this_boot(int file) noexcept {
  struct statfs kind {};
  if (::fstatfs(file, &kind) != 0) return false;
  if (kind.f_type == TMPFS_MAGIC || kind.f_type == HUGETLBFS_MAGIC) return true;
  BootId now{};
  BootId made{};
  const ssize_t bytes = ::fgetxattr(file, kAttribute, made.data(), made.size());
  return bytes > 0 && std::string_view(made.data(), static_cast<std::size_t>(bytes)) == read_boot_id(now);
}

}  // namespace deltasync::shm
