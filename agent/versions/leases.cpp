#include "agent/versions/leases.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::agent {

LeaseTable::Reader::Reader(Reader&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)), lease_(std::move(other.lease_)), waker_(other.waker_) {}

LeaseTable::Reader::~Reader() {
  if (table_ != nullptr) table_->leave(*this);
}

LeasePtr LeaseTable::begin(const HalfKey& key, LeaseTerms terms) {
  LeasePtr lease(new Lease(key, std::move(terms)));
  const std::lock_guard lock(mutex_);
  leases_.push_back(lease);
  return lease;
}

void LeaseTable::end(Lease& lease) {
  {
    const std::lock_guard lock(mutex_);
    end_locked(lease);
    drop_finished_locked();
  }
  changed_();
}

Result<LeaseTable::Reader> LeaseTable::enter(const LeasePtr& lease, std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  if (!lease->live()) return Error(Errc::lease_revoked, "the lease has ended; plan again");
  lease->wakers_.push_front(std::move(wake));
  return Reader(*this, lease, lease->wakers_.begin());
}

void LeaseTable::leave(Reader& reader) {
  {
    const std::lock_guard lock(mutex_);
    reader.lease_->wakers_.erase(reader.waker_);
    drop_finished_locked();
  }
  changed_();
}

std::vector<LeasePtr> LeaseTable::revoke(const HalfKey& key, std::chrono::nanoseconds waited) {
  std::vector<LeasePtr> revoked;
  {
    const std::lock_guard lock(mutex_);
    for (const LeasePtr& lease : leases_) {
      if (lease->key_ != key || !lease->live() || lease->terms_.grace > waited) continue;
      end_locked(*lease);
      revoked.push_back(lease);
    }
    drop_finished_locked();
  }
  if (!revoked.empty()) changed_();
  return revoked;
}

bool LeaseTable::idle(const HalfKey& key) const {
  const std::lock_guard lock(mutex_);
  return std::none_of(leases_.begin(), leases_.end(), [&](const LeasePtr& lease) { return lease->key_ == key; });
}

bool LeaseTable::generation_idle(std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return std::none_of(leases_.begin(), leases_.end(),
                      [&](const LeasePtr& lease) { return lease->key_.generation == generation; });
}

std::vector<LeaseTable::Count> LeaseTable::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<Count> counts;
  counts.reserve(leases_.size());
  for (const LeasePtr& lease : leases_) counts.push_back({lease->key_, lease->live(), lease->wakers_.size()});
  return counts;
}

void LeaseTable::end_locked(Lease& lease) {
  if (!lease.live()) return;
  lease.live_.store(false, std::memory_order_release);
  for (const auto& wake : lease.wakers_) wake();
}

void LeaseTable::drop_finished_locked() {
  leases_.remove_if([](const LeasePtr& lease) { return !lease->live() && lease->wakers_.empty(); });
}

}  // namespace deltasync::agent
