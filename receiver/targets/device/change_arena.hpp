// Memory of a device for the changes of an update, which come there when they are verified and stay until nobody can
// roll the update back: so its commit brings nothing to the device, and asks it for no memory.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <utility>

#include "gpu/device.hpp"

namespace deltasync {

/// Blocks of device memory, kept from one update to the next. Thread-safe. What is put into a room is put there through
/// one and the same stream, so that a room may be given back while work on it is still under way.
///
///   a block: | runs and changes of the first room | of the second … →        ← … pieces of the second | of the first |
///
/// Runs are counted from the beginning of the block, wherever they are; the pieces of rooms that follow each other lie
/// together, so that one launch does them all.
class ChangeArena {
  struct Block;

 public:
  /// Given back when it ends; ends before its arena.
  class Room {
   public:
    Room(ChangeArena& arena, Block& block, std::uint64_t at, std::uint64_t bytes, std::uint64_t pieces_at,
         std::uint64_t pieces)
        : arena_(&arena), block_(&block), at_(at), bytes_(bytes), pieces_at_(pieces_at), pieces_(pieces) {}
    Room(Room&& other) noexcept
        : arena_(std::exchange(other.arena_, nullptr)),
          block_(other.block_),
          at_(other.at_),
          bytes_(other.bytes_),
          pieces_at_(other.pieces_at_),
          pieces_(other.pieces_) {}
    Room& operator=(Room&&) = delete;
    ~Room() {
      if (arena_ != nullptr) arena_->give_back(*this);
    }

    std::byte* base() const noexcept { return block_->memory.data(); }  ///< of its block
    std::uint64_t at() const noexcept { return at_; }                   ///< from there: runs, then changes
    std::uint64_t first_run() const noexcept { return at_ / sizeof(gpu::WordRun); }
    std::uint64_t pieces_at() const noexcept { return pieces_at_; }
    std::uint64_t pieces() const noexcept { return pieces_; }

   private:
    friend class ChangeArena;
    std::uint64_t takes() const noexcept { return bytes_ + pieces_ * sizeof(gpu::WordPiece); }

    ChangeArena* arena_;
    Block* block_;
    std::uint64_t at_;
    std::uint64_t bytes_;
    std::uint64_t pieces_at_;
    std::uint64_t pieces_;
  };

  /// Takes `bytes_max` of the device at most, when it is needed.
  ChangeArena(gpu::Device& device, std::uint64_t bytes_max) : device_(device), bytes_max_(bytes_max) {}

  /// Room for `bytes` of runs and changes, and for so many pieces. None if that is more than there may be, or than the
  /// device has left.
  std::optional<Room> claim(std::uint64_t bytes, std::uint64_t pieces);

  /// An update begins. True if nothing is in use, and of the last updates none took a quarter of what is here: then
  /// give_up() makes sense, once the stream has come to its end.
  bool is_too_large();
  void give_up();
  /// Forgets all memory: a stream that does not end may still use it.
  void abandon();

  std::uint64_t bytes() const;  ///< of the device

 private:
  struct Block {
    gpu::Memory memory;
    std::uint64_t front = 0;  ///< end of what is used at the beginning
    std::uint64_t back = 0;   ///< begin of what is used at the end
    std::uint64_t rooms = 0;
  };
  std::optional<Room> claim_in_locked(Block& block, std::uint64_t bytes, std::uint64_t pieces);
  bool grow_locked(std::uint64_t bytes);
  void give_back(const Room& room);

  gpu::Device& device_;
  const std::uint64_t bytes_max_;

  mutable std::mutex mutex_;  ///< protects all of the following
  std::list<Block> blocks_;
  std::uint64_t bytes_ = 0;
  std::uint64_t used_ = 0;
  std::uint64_t most_used_ = 0;               ///< by the update at hand
  std::array<std::uint64_t, 8> used_before_;  ///< by the last ones
  std::size_t updates_ = 0;
  bool refused_ = false;  ///< the device had no more: it is not asked again by this update
};

}  // namespace deltasync
