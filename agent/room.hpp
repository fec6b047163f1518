// A budget of memory that many share. To avoid deadlock, nobody waits for a share while it has one, unless that one is
// of take_first(): a part of the budget is out of its reach, and is left for those who wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace deltasync::agent {

/// Copies are the same budget. Thread-safe.
class Room {
 public:
  explicit Room(std::uint64_t bytes) : bytes_max_(bytes), left_(std::make_shared<std::atomic<std::uint64_t>>(bytes)) {}

  /// Returned to the budget by its destructor. May outlive the Room.
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
    /// Gives back all but `bytes`; does nothing if it has no more.
    void shrink(std::uint64_t bytes) noexcept {
      if (left_ == nullptr || bytes >= bytes_) return;
      left_->fetch_add(bytes_ - bytes, std::memory_order_relaxed);
      bytes_ = bytes;
    }

   private:
    friend class Room;
    Share(std::shared_ptr<std::atomic<std::uint64_t>> left, std::uint64_t bytes)
        : left_(std::move(left)), bytes_(bytes) {}
    std::shared_ptr<std::atomic<std::uint64_t>> left_;
    std::uint64_t bytes_ = 0;
  };

  /// Nothing if less is left.
  std::optional<Share> take(std::uint64_t bytes) const { return take_down_to(0, bytes); }
  /// For holders that may wait for more later. Leaves waited_bytes_max() for those who wait.
  std::optional<Share> take_first(std::uint64_t bytes) const { return take_down_to(waited_bytes_max(), bytes); }
  /// For caches: leaves half of the budget to others.
  std::optional<Share> take_spare(std::uint64_t bytes) const { return take_down_to(bytes_max_ / 2, bytes); }

  std::uint64_t bytes_max() const noexcept { return bytes_max_; }
  /// The most that may be waited for; a wait for more might never end.
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
