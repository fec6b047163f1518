#include "shm/huge_pages.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/thread_pool.hpp"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace deltasync::shm {

HugePages::HugePages(std::byte* base, std::size_t bytes) {
  if (bytes < kBytesMin) return;
  try {
    thread_ = std::thread([this, base, bytes] { work(base, bytes); });
  } catch (const std::system_error&) {
    // no thread to be had: small pages serve as well
  }
}

HugePages::~HugePages() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void HugePages::work(std::byte* base, std::size_t bytes) {
  set_thread_name("shm-huge");
  // On Linux a nice value belongs to the thread.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
  constexpr std::size_t kStep = std::size_t{8} << 20;  // short enough to stop soon
  for (std::size_t at = 0; at < bytes && !stop_; at += kStep) {
    const int failed = ::madvise(base + at, std::min(kStep, bytes - at), MADV_COLLAPSE);
    // EAGAIN: pages in use for a moment. Anything else will not get better: no support, or no huge page left.
    if (failed != 0 && errno != EAGAIN) return;
  }
}

}  // namespace deltasync::shm
