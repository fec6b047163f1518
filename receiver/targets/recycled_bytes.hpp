// Memory that one update after another needs in about the same amount: large blocks go round, instead of back to the
// system, whose fresh pages would cost more than what is written to them (a quarter of verifying a delta of 5%).
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace deltasync {

/// Blocks that were given back, by size. Thread-safe.
class BlockPool {
 public:
  static constexpr std::size_t kBlockMin = std::size_t{64} << 10;  ///< smaller ones are the allocator's own business

  /// The one that RecycledBytes use. Never destroyed.
  static BlockPool& shared();
  BlockPool() = default;
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool() { trim(); }

  /// At least `bytes`, at most a quarter more; what is in them is left to chance. Where none of that size is idle, as
  /// much of the other sizes goes back to the system. Throws std::bad_alloc.
  void* take(std::size_t bytes);
  /// What take() gave for as many bytes.
  void give_back(void* block, std::size_t bytes) noexcept;
  /// Gives all blocks that nobody has back to the system.
  void trim() noexcept;
  /// Bytes of the blocks that nobody has.
  std::size_t idle_bytes() const noexcept;

 private:
  struct Block {
    Block* next;
  };
  /// Four sizes to each power of two.
  struct Size {
    std::size_t bytes;
    std::size_t index;
  };
  static Size size_for(std::size_t bytes) noexcept;
  static std::size_t bytes_of(std::size_t index) noexcept;
  void* pop_locked(std::size_t index, std::size_t bytes) noexcept;
  static void free_all(Block* block) noexcept;

  mutable std::mutex mutex_;
  std::size_t idle_bytes_ = 0;
  std::array<Block*, 4 * 64> idle_{};  ///< by Size::index; lists within the blocks themselves
};

/// For std::vector: memory of BlockPool::shared(), and resize() leaves new bytes as they are.
template <class T>
struct RecyclingAllocator {
  using value_type = T;
  using is_always_equal = std::true_type;
  RecyclingAllocator() noexcept = default;
  template <class U>
  explicit RecyclingAllocator(const RecyclingAllocator<U>& /*all are the same*/) noexcept {}
  T* allocate(std::size_t n) { return static_cast<T*>(BlockPool::shared().take(n * sizeof(T))); }
  void deallocate(T* block, std::size_t n) noexcept { BlockPool::shared().give_back(block, n * sizeof(T)); }
  template <class U>
  void construct(U* at) noexcept(std::is_nothrow_default_constructible_v<U>) {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
  }
  bool operator==(const RecyclingAllocator&) const noexcept { return true; }
};

using RecycledBytes = std::vector<std::byte, RecyclingAllocator<std::byte>>;

}  // namespace deltasync
