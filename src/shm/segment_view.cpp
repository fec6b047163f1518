#include "shm/segment_view.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "shm/huge_pages.hpp"
#include "shm/protocol.hpp"
#include "shm/validate.hpp"

namespace deltasync::shm {
namespace {

constexpr const char* kWhat = "the agent's segment";

/// As much of the protocol's memory as a reader needs.
class ReadOnlyCells {
 public:
  using Cell = const std::uint64_t*;

  explicit ReadOnlyCells(const ControlBlock& block) : b_(block) {}
  Cell half_state(unsigned half) const noexcept { return &b_.state[half & 1u].word; }
  static std::uint64_t load(Cell cell) noexcept { return __atomic_load_n(cell, __ATOMIC_SEQ_CST); }
  static constexpr bool broken(Guard) noexcept { return false; }

 private:
  const ControlBlock& b_;
};

}  // namespace

Result<std::unique_ptr<SegmentView>> SegmentView::map(const UniqueFd& file) {
  struct stat st {};
  if (::fstat(file.get(), &st) != 0) return Error::from_errno(kWhat, errno);
  DS_TRY(check_file(st).with_context(kWhat));
  const auto bytes = static_cast<std::size_t>(st.st_size);
  void* const at = ::mmap(aligned_hint(bytes), bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (at == MAP_FAILED) return Error::from_errno(std::string("map ") + kWhat, errno);
  ::madvise(at, bytes, MADV_DONTFORK);  // a forked data loader would keep its memory alive
  ::madvise(at, bytes, MADV_HUGEPAGE);
  const auto* const base = static_cast<const std::byte*>(at);
  std::unique_ptr<SegmentView> view(new SegmentView(base, bytes));
  DS_TRY(check_control(base, bytes).with_context(kWhat));
  for (const std::uint64_t offset : view->header_.half_offset) {
    if (offset > bytes || view->header_.half_bytes > bytes - offset) {
      return Error(Errc::corrupt, std::string(kWhat) + " changed while it was checked");
    }
  }
  return view;
}

SegmentView::~SegmentView() {
  // A forked child does not have the mapping: something else may lie at its address there.
  if (fork_guard_.same_process()) ::munmap(const_cast<std::byte*>(base_), bytes_);
}

Digest128 SegmentView::layout_digest() const noexcept {
  Digest128 digest;
  std::memcpy(digest.bytes.data(), header_.layout_digest, digest.bytes.size());
  return digest;
}

ByteSpan SegmentView::half(unsigned index) const noexcept {
  return {base_ + header_.half_offset[index & 1u], static_cast<std::size_t>(header_.half_bytes)};
}

bool SegmentView::still_holds(unsigned half, std::uint64_t sequence) const noexcept {
  // SYNC POINT given back (acquire), as in shm::still_holds().
  std::atomic_thread_fence(std::memory_order_acquire);
  ReadOnlyCells cells(control());
  return Protocol<ReadOnlyCells>(cells).holds(half, sequence);
}

}  // namespace deltasync::shm
