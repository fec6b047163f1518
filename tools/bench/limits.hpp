// The machine's limits, measured beside the work: copying and reading. Of sockets: transfers.hpp.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"

namespace deltasync::bench {

/// Anonymous memory, every page touched, huge pages asked for. A forked child does not have it: else every page that
/// the parent writes to meanwhile would be copied first.
class Buffer {
 public:
  static Result<Buffer> allocate(std::uint64_t bytes, ThreadPool& pool);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();
  std::span<std::byte> span() const noexcept { return {data_, static_cast<std::size_t>(bytes_)}; }

 private:
  Buffer(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// Seconds of one copy with all of the pool's threads, by the fastest of three ways: memcpy in pieces that the threads
/// take in turn, memcpy of one share a thread (large enough for the C library to go past the caches), and pieces in the
/// fastest of the writer's forms.
double copy_once(std::span<std::byte> to, std::span<const std::byte> from, ThreadPool& pool);
/// Best of 5.
double memcpy_s(std::span<std::byte> to, std::span<const std::byte> from, ThreadPool& pool);

/// Seconds to load every byte of both with the widest loads of this CPU.
double read_both_once(std::span<const std::byte> a, std::span<const std::byte> b, ThreadPool& pool);

}  // namespace deltasync::bench
