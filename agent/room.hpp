// So much memory at most for all who take from it. Nobody may wait for some with any of its own in hand, but for what
// take_first() gave: of that there is always enough left for those who wait, so that they do not wait for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace deltasync::agent {

/// Copies are the same room. Thread-safe.
class Room {
 public:
  explicit Room(std::uint64_t bytes) : bytes_max_(bytes), left_(std::make_shared<std::atomic<std::uint64_t>>(bytes)) {}

  /// Goes back when it is destroyed, even after the room.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept : left_(std::move(other.left_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(left_, other.left_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Share() {
      if (left_) left_->fetch_add(bytes_, std::memory_order_relaxed);
    }

   private:
    friend class Room;
    Share(std::shared_ptr<std::atomic<std::uint64_t>> left, std::uint64_t bytes)
        : left_(std::move(left)), bytes_(bytes) {}
    std::shared_ptr<std::atomic<std::uint64_t>> left_;
    std::uint64_t bytes_ = 0;
  };

  /// Nothing if there is not so much left.
  std::optional<Share> take(std::uint64_t bytes) const { return take_down_to(0, bytes); }
  /// For what is held by those who may come to wait for more: waited_bytes_max() stay for them.
  std::optional<Share> take_first(std::uint64_t bytes) const { return take_down_to(waited_bytes_max(), bytes); }
  /// For what is kept in the hope that it is of use: half of the room stays for others.
  std::optional<Share> take_spare(std::uint64_t bytes) const { return take_down_to(bytes_max_ / 2, bytes); }

  std::uint64_t bytes_max() const noexcept { return bytes_max_; }
  /// Who waits for more than this could wait for ever.
  std::uint64_t waited_bytes_max() const noexcept { return bytes_max_ / 4; }
  std::uint64_t bytes_taken() const noexcept { return bytes_max_ - left_->load(std::memory_order_relaxed); }

 private:
  std::optional<Share> take_down_to(std::uint64_t floor, std::uint64_t bytes) const {
    std::uint64_t left = left_->load(std::memory_order_relaxed);
    while (left >= bytes && left - bytes >= floor) {
      if (left_->compare_exchange_weak(left, left - bytes, std::memory_order_relaxed)) return Share(left_, bytes);
    }
    return std::nullopt;
  }

  std::uint64_t bytes_max_;
  std::shared_ptr<std::atomic<std::uint64_t>> left_;
};

}  // namespace deltasync::agent
