#include "receiver/pull/transfer_meter.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace deltasync::receiver {

void TransferMeter::begin(const std::string& version, std::uint64_t had, std::uint64_t total) {
  version_ = version;
  had_ = had;
  began_ = Clock::now();
  say_at_ = began_ + every_;
  done_ = had;
  total_ = total;
}

void TransferMeter::add(std::uint64_t bytes) {
  done_.fetch_add(bytes, std::memory_order_relaxed);
  const Clock::time_point now = Clock::now();
  Clock::time_point due = say_at_.load(std::memory_order_relaxed);
  if (now < due || !say_at_.compare_exchange_strong(due, now + every_)) return;  // else another stream says it
  const auto [done, total] = look();
  const double seconds = std::chrono::duration<double>(now - began_).count();
  const double rate = static_cast<double>(done - std::min(had_, done)) / seconds;
  const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
  log::info("pull_progress version=\"{}\" done_bytes={} total_bytes={} percent={:.0f} mb_per_s={:.1f} left_s={:.0f}",
            version_, done, total,
            100.0 * static_cast<double>(done) / static_cast<double>(std::max<std::uint64_t>(1, total)), rate / 1e6,
            left);
}

std::pair<std::uint64_t, std::uint64_t> TransferMeter::look() const noexcept {
  const std::uint64_t total = total_.load(std::memory_order_relaxed);
  // Tiles that come a second time are counted twice.
  return {std::min(done_.load(std::memory_order_relaxed), total), total};
}

}  // namespace deltasync::receiver
