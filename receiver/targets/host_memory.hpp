// A large private mapping: on huge pages where the system gives them, and with its pages present before it is handed
// out, so that too little memory is an error of this call and not a surprise in the middle of a transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "base/memory_room.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

class HostMemory {
 public:
  static constexpr std::uint64_t kHugePageBytes = 2u << 20;

  HostMemory() = default;
  /// Zeroed. no_space if the system refuses it, or the cgroup has no room for it; timed_out or cancelled if its pages
  /// are not all there by `until`. `bytes` may be 0.
  static Result<HostMemory> map(std::uint64_t bytes, ThreadPool& pool, const CallContext& until,
                                const CgroupFiles& cgroup = {});

  /// Bytes [first, end) of a mapping.
  struct Part {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
  };
  /// The same with the pages of these parts only (sorted, disjoint, inside), huge ones where a part begins or ends in
  /// one: memory for the others is taken when somebody writes to them.
  static Result<HostMemory> map_parts(std::uint64_t bytes, const std::vector<Part>& parts, ThreadPool& pool,
                                      const CallContext& until, const CgroupFiles& cgroup = {});

  HostMemory(HostMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HostMemory& operator=(HostMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~HostMemory();

  explicit operator bool() const noexcept { return data_ != nullptr; }
  std::span<std::byte> span() const noexcept { return {data_, static_cast<std::size_t>(bytes_)}; }
  void release() noexcept { HostMemory().swap(*this); }
  /// A forked child has none of it. Where a device reads memory, a child's share of it would be a copy, or would leave
  /// the device with the copy and this process with other pages.
  void keep_from_children() const noexcept;
  /// Forgets it: for what a device may still read.
  void abandon() noexcept { data_ = nullptr; }
  void swap(HostMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

 private:
  HostMemory(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;  ///< asked for; the mapping is rounded up to pages and is never empty
};

}  // namespace deltasync
