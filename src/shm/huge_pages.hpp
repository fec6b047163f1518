// Huge pages for memory that the system does not give them to by itself (MADV_HUGEPAGE has no effect on shared memory
// where shmem_enabled is "never", which is the default; MADV_COLLAPSE has).
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

namespace deltasync::shm {

/// Collapses a mapped range into huge pages on a thread of its own, at the lowest priority: the kernel copies every
/// page, which takes 1 to 2 s a GiB, and nobody should wait for it. Contents and addresses do not change; others may
/// use the memory meanwhile. The range must stay mapped until this object is destroyed, which stops the work.
class HugePages {
 public:
  /// Does nothing for ranges below kBytesMin.
  HugePages(std::byte* base, std::size_t bytes);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  static constexpr std::size_t kBytesMin = std::size_t{64} << 20;

 private:
  void work(std::byte* base, std::size_t bytes);

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace deltasync::shm
