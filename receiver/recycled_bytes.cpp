#include "receiver/recycled_bytes.hpp"

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

void* BlockPool::take(std::size_t bytes) {
  if (bytes < kBlockMin) return ::operator new(bytes);
  const Size size = size_for(bytes);
  {
    const std::lock_guard lock(mutex_);
    if (Block*& first = idle_[size.index]; first != nullptr) {
      Block* const block = first;
      first = block->next;
      idle_bytes_ -= size.bytes;
      block->~Block();
      return block;
    }
  }
  return ::operator new(size.bytes);
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
  for (Block* block : idle) {
    while (block != nullptr) ::operator delete(std::exchange(block, block->next));
  }
}

std::size_t BlockPool::idle_bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return idle_bytes_;
}

}  // namespace deltasync
