#include "shm/arriving_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

#include "base/memory_room.hpp"
#include "shm/huge_pages.hpp"
#include "shm/space.hpp"

namespace deltasync::shm {
namespace {

constexpr std::uint64_t kMarksOffset = 64;
constexpr std::uint64_t kModelAlignment = std::uint64_t{2} << 20;  ///< a huge page
constexpr std::uint64_t kReservedTogetherBytes = std::uint64_t{256} << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// An errno, or 0.
int reserve(int file, std::byte* base, std::uint64_t begin, std::uint64_t end, bool huge) {
  if (huge) fill_with_huge_pages(file, base, begin, end);
  return reserve_pages(end - begin, [&](std::uint64_t offset, std::uint64_t bytes) {
    return ::posix_fallocate(file, static_cast<off_t>(begin + offset), static_cast<off_t>(bytes));
  });
}

}  // namespace

std::uint64_t ArrivingShape::model_offset() const noexcept {
  return round_up(kMarksOffset + tiles, kModelAlignment);
}

std::uint64_t ArrivingShape::bytes() const noexcept {
  return round_up(model_offset() + half_bytes, kModelAlignment);
}

ArrivingMemory::~ArrivingMemory() {
  if (fork_guard_.same_process()) ::munmap(base_, static_cast<std::size_t>(shape_.bytes()));
}

Result<std::unique_ptr<ArrivingMemory>> ArrivingMemory::map(UniqueFd file, const ArrivingShape& shape, bool writes) {
  const auto bytes = static_cast<std::size_t>(shape.bytes());
  const int access = writes ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const base = ::mmap(aligned_hint(bytes), bytes, access, MAP_SHARED, file.get(), 0);
  if (base == MAP_FAILED) return Error::from_errno("map memory for a version that arrives", errno);
  ::madvise(base, bytes, MADV_DONTFORK);
  return std::unique_ptr<ArrivingMemory>(new ArrivingMemory(std::move(file), static_cast<std::byte*>(base), shape));
}

Result<std::unique_ptr<ArrivingMemory>> ArrivingMemory::make(const ArrivingShape& shape, ThreadPool& pool,
                                                             const CallContext& until) {
  const std::uint64_t bytes = shape.bytes();
  DS_TRY(check_memory_room(shape.half_bytes));
  UniqueFd file(::memfd_create("deltasync-arriving", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return Error::from_errno("memory for a version that arrives", errno);
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    return Error::from_errno("its size of " + bytes_for_people(bytes), errno);
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) return Error::from_errno("seal its size", errno);
  DS_ASSIGN(auto memory, map(std::move(file), shape, true));
  std::atomic<int> error{0};
  pool.run((bytes + kReservedTogetherBytes - 1) / kReservedTogetherBytes, [&](std::uint64_t piece, unsigned) {
    if (error != 0 || until.over()) return;
    const std::uint64_t begin = piece * kReservedTogetherBytes;
    const int failed = reserve(memory->file(), memory->base_, begin, std::min(begin + kReservedTogetherBytes, bytes),
                               bytes >= kHugeBytesMin);
    if (failed != 0) error = failed;
  });
  if (error != 0) return Error::from_errno("reserve " + bytes_for_people(bytes), error);
  DS_TRY(until.check("reserving memory"));
  return memory;
}

Result<std::unique_ptr<ArrivingMemory>> ArrivingMemory::open(UniqueFd file, const ArrivingShape& shape) {
  const std::string what = "memory of a version that arrives: ";
  if (!file) return Error(Errc::corrupt, what + "no descriptor came along");
  // The seals first: after them the size is what it stays.
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return Error(Errc::corrupt, what + "its size is not sealed");
  struct stat found {};
  if (::fstat(file.get(), &found) != 0) return Error::from_errno(what, errno);
  if (static_cast<std::uint64_t>(found.st_size) != shape.bytes()) {
    return Error(Errc::corrupt,
                 what + "it has " + std::to_string(found.st_size) + " bytes, not " + std::to_string(shape.bytes()));
  }
  if (static_cast<std::uint64_t>(found.st_blocks) * 512 < shape.bytes()) {  // st_blocks has this unit
    return Error(Errc::corrupt, what + "pages of it are not there");
  }
  return map(std::move(file), shape, false);
}

std::uint8_t& ArrivingMemory::mark(std::uint64_t tile) const noexcept {
  return *reinterpret_cast<std::uint8_t*>(base_ + kMarksOffset + tile);
}

void ArrivingMemory::set_in_place(std::uint64_t tile) noexcept {
  // What was copied past the caches is out by then too.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (std::atomic_ref(mark(tile)).exchange(1) != 0) return;
  std::atomic_ref(*reinterpret_cast<std::uint64_t*>(base_)).fetch_add(1);
}

bool ArrivingMemory::in_place(std::uint64_t tile) const noexcept {
  return std::atomic_ref(mark(tile)).load(std::memory_order_acquire) == 1;
}

std::uint64_t ArrivingMemory::tiles_in_place() const noexcept {
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(base_)).load();
}

}  // namespace deltasync::shm
