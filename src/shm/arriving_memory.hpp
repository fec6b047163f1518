// The memory in which a version comes together at a relay, shared with the agent that it writes to: unnamed, of a size
// that nobody can change, and passed on as a descriptor. It bears one version, whose digests the agent has been told;
// no half of the segment is concerned.
//
//   0              64            model_offset (a multiple of 2 MiB)
//   +--------------+-----+-------+---------------------------------
//   | tiles (u64)  | … 0 | mark… |  the bytes of a half
//   +--------------+-----+-------+---------------------------------
//
// tiles: how many are in place. A mark is a byte for each tile, 1 once it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/bytes.hpp"
#include "base/call_context.hpp"
#include "base/fd.hpp"
#include "base/fork_guard.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"

namespace deltasync::shm {

struct ArrivingShape {
  std::uint64_t tiles = 0;
  std::uint64_t half_bytes = 0;

  std::uint64_t model_offset() const noexcept;
  std::uint64_t bytes() const noexcept;
};

class ArrivingMemory {
 public:
  /// The relay's: nothing is in place, and every page is there. no_space says how much is needed.
  static Result<std::unique_ptr<ArrivingMemory>> make(const ArrivingShape& shape, ThreadPool& pool,
                                                      const CallContext& until);
  /// The agent's, to be read. corrupt if the descriptor is of no such memory: another size, or one that its owner could
  /// shrink, so that reading it would end this process.
  static Result<std::unique_ptr<ArrivingMemory>> open(UniqueFd file, const ArrivingShape& shape);
  ~ArrivingMemory();
  ArrivingMemory(const ArrivingMemory&) = delete;
  ArrivingMemory& operator=(const ArrivingMemory&) = delete;

  int file() const noexcept { return file_.get(); }
  std::uint64_t model_offset() const noexcept { return shape_.model_offset(); }
  /// Of tiles that are not in place nobody knows what there is.
  ByteSpan model() const noexcept { return {base_ + shape_.model_offset(), half_bytes()}; }
  /// The same to be written: the relay's alone.
  std::span<std::byte> room() noexcept { return {base_ + shape_.model_offset(), half_bytes()}; }

  /// SYNC POINT arrival (release): the tile's bytes are there, and have its digest. Any thread.
  void set_in_place(std::uint64_t tile) noexcept;
  /// SYNC POINT arrival (acquire): its bytes may be read.
  bool in_place(std::uint64_t tile) const noexcept;
  /// How many are; it only grows.
  std::uint64_t tiles_in_place() const noexcept;
  std::uint64_t tiles() const noexcept { return shape_.tiles; }

 private:
  ArrivingMemory(UniqueFd file, std::byte* base, const ArrivingShape& shape)
      : file_(std::move(file)), base_(base), shape_(shape) {}
  static Result<std::unique_ptr<ArrivingMemory>> map(UniqueFd file, const ArrivingShape& shape, bool writes);
  std::size_t half_bytes() const noexcept { return static_cast<std::size_t>(shape_.half_bytes); }
  std::uint8_t& mark(std::uint64_t tile) const noexcept;

  const UniqueFd file_;
  std::byte* const base_;
  const ArrivingShape shape_;
  const ForkGuard fork_guard_;
};

}  // namespace deltasync::shm
