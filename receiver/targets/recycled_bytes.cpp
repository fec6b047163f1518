#include "receiver/targets/recycled_bytes.hpp"

#include <bit>

namespace deltasync {

BlockPool& BlockPool::shared() {
  static BlockPool* const pool = new BlockPool;  // outlives whatever is destroyed at the end
  return *pool;
}

/// Rounds up to five, six, seven or eight eighths of a power of two.
BlockPool::Size BlockPool::size_for(std::size_t bytes) noexcept {
  const auto shift = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 3;
  const std::size_t eighths = ((bytes - 1) >> shift) + 1;
  return {eighths << shift, 4 * shift + (eighths - 5)};
}

std::size_t BlockPool::bytes_of(std::size_t index) noexcept {
  return (index % 4 + 5) << (index / 4);
}

void* BlockPool::take(std::size_t bytes) {
  if (bytes < kBlockMin) return ::operator new(bytes);
  const Size size = size_for(bytes);
  Block* given_up = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (idle_[size.index] != nullptr) return pop_locked(size.index, size.bytes);
    // Else blocks of the sizes that are not wanted any more would stay beside those that are.
    std::size_t freed = 0;
    for (std::size_t index = 0; index < idle_.size() && freed < size.bytes; ++index) {
      if (idle_[index] == nullptr) continue;
      const std::size_t block_bytes = bytes_of(index);
      for (; idle_[index] != nullptr && freed < size.bytes; freed += block_bytes) {
        given_up = new (pop_locked(index, block_bytes)) Block{given_up};
      }
    }
  }
  free_all(given_up);
  return ::operator new(size.bytes);
}

void* BlockPool::pop_locked(std::size_t index, std::size_t bytes) noexcept {
  Block* const block = idle_[index];
  idle_[index] = block->next;
  idle_bytes_ -= bytes;
  return block;
}

void BlockPool::free_all(Block* block) noexcept {
  while (block != nullptr) ::operator delete(std::exchange(block, block->next));
}

void BlockPool::give_back(void* block, std::size_t bytes) noexcept {
  if (bytes < kBlockMin) return ::operator delete(block);
  const Size size = size_for(bytes);
  const std::lock_guard lock(mutex_);
  idle_[size.index] = new (block) Block{idle_[size.index]};
  idle_bytes_ += size.bytes;
}

void BlockPool::trim() noexcept {
  std::array<Block*, 4 * 64> idle{};
  {
    const std::lock_guard lock(mutex_);
    idle.swap(idle_);
    idle_bytes_ = 0;
  }
  for (Block* block : idle) free_all(block);
}

std::size_t BlockPool::idle_bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return idle_bytes_;
}

}  // namespace deltasync
