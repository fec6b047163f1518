#include "tests/gpu/emulator/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <utility>

namespace deltasync::emulator {
namespace {

constexpr std::uint64_t kAddresses = std::uint64_t{1} << 38;  // no test of a process allocates 256 GiB in all
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kChanceBytes = std::uint64_t{1} << 24;  // what was there before; more of it takes time

std::byte* map(int protection, int flags, int file) {
  void* const at = ::mmap(nullptr, kAddresses, protection, flags | MAP_NORESERVE, file, 0);
  if (at == MAP_FAILED) {
    std::perror("emulator: mmap of the devices' addresses");
    std::abort();
  }
  return static_cast<std::byte*>(at);
}

std::uintptr_t number(const void* at) {
  return reinterpret_cast<std::uintptr_t>(at);
}

}  // namespace

Memory::Memory(std::uint64_t bytes_max) : bytes_max_(bytes_max) {
  const int file = ::memfd_create("emulated devices", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(kAddresses)) != 0) {
    std::perror("emulator: memfd_create");
    std::abort();
  }
  addresses_ = map(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  contents_ = map(PROT_READ | PROT_WRITE, MAP_SHARED, file);
  ::close(file);
}

Memory::~Memory() {
  ::munmap(addresses_, kAddresses);
  ::munmap(contents_, kAddresses);
}

std::byte* Memory::allocate(int device, std::uint64_t bytes, When when) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t pages = (bytes + kPage - 1) / kPage * kPage;
  if (pages < bytes || bytes > bytes_max_ - used_[device]) return nullptr;
  if (next_ + pages + kPage > kAddresses) {
    std::cerr << "emulator: a test allocates more device memory in all than there are addresses for it\n";
    std::abort();
  }
  // Its end is as near to the end of a page as its alignment allows.
  std::byte* const at = addresses_ + next_ + (pages - bytes) / 256 * 256;
  next_ += pages + kPage;
  used_[device] += bytes;
  ranges_[number(at)] = {number(at), number(at) + bytes, device, false, when == When::now};
  std::memset(contents_ + (at - addresses_), 0xC5, static_cast<std::size_t>(std::min(bytes, kChanceBytes)));
  return at;
}

void Memory::arrive(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  ranges_.at(number(data)).is_there = true;
}

void Memory::give_back(int device) {
  const std::lock_guard lock(mutex_);
  used_[device] -= std::exchange(freed_[device], 0);
}

bool Memory::free(const void* data, When room) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(number(data));
  if (found == ranges_.end() || found->second.device == kHost) return false;
  const std::uint64_t bytes = found->second.end - found->second.begin;
  if (room == When::now) used_[found->second.device] -= bytes;
  if (room == When::later) freed_[found->second.device] += bytes;
  ranges_.erase(found);
  // Whole pages go back; nothing else is on these.
  const std::uintptr_t begin = number(real(data)) / kPage * kPage;
  const std::uintptr_t end = number(real(data)) + bytes;
  ::madvise(reinterpret_cast<void*>(begin), (end - begin + kPage - 1) / kPage * kPage, MADV_REMOVE);
  return true;
}

bool Memory::add_host(const void* data, std::uint64_t bytes, bool pinned) {
  const std::lock_guard lock(mutex_);
  const Range made{number(data), number(data) + bytes, kHost, pinned};
  const auto next = ranges_.lower_bound(made.begin);
  if (next != ranges_.end() && next->second.begin < made.end) return false;
  if (next != ranges_.begin() && std::prev(next)->second.end > made.begin) return false;
  ranges_[made.begin] = made;
  return true;
}

bool Memory::remove_host(const void* data, bool pinned) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(number(data));
  if (found == ranges_.end() || found->second.device != kHost || found->second.pinned != pinned) return false;
  ranges_.erase(found);
  return true;
}

std::optional<Memory::Range> Memory::find(const void* at) const {
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.upper_bound(number(at));
  if (next == ranges_.begin() || std::prev(next)->second.end < number(at)) return std::nullopt;
  if (!std::prev(next)->second.is_there) return std::nullopt;
  return std::prev(next)->second;
}

bool Memory::is_device(const void* at) const {
  return number(at) >= number(addresses_) && number(at) < number(addresses_) + kAddresses;
}

std::byte* Memory::real(const void* at) const {
  if (is_device(at)) return contents_ + (number(at) - number(addresses_));
  return const_cast<std::byte*>(static_cast<const std::byte*>(at));
}

}  // namespace deltasync::emulator
