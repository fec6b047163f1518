#include "gpu/registrations.hpp"

#include <chrono>
#include <utility>

#include "base/log.hpp"
#include "gpu/ends_later.hpp"

namespace deltasync::gpu {
namespace {

/// For who wants again what is being ended, which takes this long if no device is busy.
constexpr std::chrono::seconds kEndsWithin{5};

}  // namespace

Registrations& Registrations::of_process() {
  static auto* const made = new Registrations;
  return *made;
}

Status Registrations::add(const std::string& who, const std::byte* data, std::uint64_t bytes,
                          std::shared_ptr<const void> keeper, const Call& begin, Call end) {
  DS_TRY(EndsLater::of_process().start());
  std::unique_lock lock(mutex_);
  bool is_taken = false;
  DS_TRY(take(lock, data, bytes, is_taken).with_context(who + ": registering host memory"));
  if (is_taken) return {};
  ranges_[data] = {bytes, 1, Range::State::beginning, std::move(keeper), std::move(end)};
  lock.unlock();
  Status begun = begin();
  lock.lock();
  if (begun.ok()) {
    ranges_.at(data).state = Range::State::held;
  } else {
    ranges_.erase(data);
  }
  return begun;
}

/// Of what is there already.
Status Registrations::take(std::unique_lock<std::mutex>& lock, const std::byte* data, std::uint64_t bytes,
                           bool& is_taken) {
  const auto is_ending = [&] {
    const auto found = ranges_.find(data);
    return found != ranges_.end() && found->second.state == Range::State::ending;
  };
  if (!ended_.wait_for(lock, kEndsWithin, [&] { return !is_ending(); })) {
    return Error(Errc::io, "that of before is being ended, which waits for a device's work");
  }
  const auto found = ranges_.find(data);
  if (found == ranges_.end()) return {};
  Range& range = found->second;
  if (range.state == Range::State::beginning) return Error(Errc::io, "another thread does so");
  if (range.state == Range::State::stuck) return Error(Errc::io, "that of before could not be ended");
  if (range.bytes != bytes) {
    return Error(Errc::io, std::to_string(range.bytes) + " bytes from there on are registered already");
  }
  ++range.users;
  is_taken = true;
  return {};
}

void Registrations::remove(const std::byte* data) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(data);
  if (found == ranges_.end() || --found->second.users != 0) return;
  EndsLater::of_process().put([this, data] { end(data); });
}

void Registrations::end(const std::byte* data) {
  Range ended;  // unmaps the memory when nobody has a lock
  std::unique_lock lock(mutex_);
  const auto found = ranges_.find(data);
  if (found == ranges_.end() || found->second.users != 0 || found->second.state != Range::State::held) return;
  Range& range = found->second;
  range.state = Range::State::ending;
  lock.unlock();
  const Status status = range.end();
  lock.lock();
  if (status.ok()) {
    ended = std::move(range);
    ranges_.erase(found);
  } else {
    range.state = Range::State::stuck;
    log::warn("gpu keeps_registered bytes={} why=\"{}\"", range.bytes, status.error().to_string());
  }
  ended_.notify_all();
}

}  // namespace deltasync::gpu
