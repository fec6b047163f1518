// Who reads which half. A full plan holds a lease on one version in one half. Every loop that reads the half's bytes
// for that plan is a Reader under the lease. A half may be handed back to the writers only when idle() says so: no live
// lease on it, and no Reader inside.
//
// A lease ends when the receiver releases it, when its control connection closes, at the plan's deadline, or by
// revocation. That wakes its readers, which stop before their next piece. What the socket took before is out of reach:
// pages that were handed to sendfile are read when the peer receives them. So a receiver that has not acknowledged
// trusts only tiles that match the digests fixed at the seal.
#pragma once

#include <atomic>
#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/result.hpp"
#include "net/message_stream.hpp"

namespace deltasync::agent {

/// One version in one half: a later fill of the same half is another key.
struct HalfKey {
  std::uint64_t generation = 0;
  unsigned half = 0;
  std::uint64_t sequence = 0;

  auto operator<=>(const HalfKey&) const = default;
};

class LeaseTable;

/// What a lease was given with.
struct LeaseTerms {
  /// For how long a writer waits before the lease is revoked.
  std::chrono::nanoseconds grace = std::chrono::nanoseconds::max();
  std::string host;  ///< of the peer
  std::string name;  ///< as it calls itself
};

class Lease {
 public:
  const HalfKey& key() const noexcept { return key_; }
  const LeaseTerms& terms() const noexcept { return terms_; }
  bool live() const noexcept { return live_.load(std::memory_order_acquire); }

 private:
  friend class LeaseTable;
  Lease(HalfKey key, LeaseTerms terms) : key_(key), terms_(std::move(terms)) {}
  const HalfKey key_;
  const LeaseTerms terms_;
  std::atomic<bool> live_{true};             // written under the table's mutex
  std::list<std::function<void()>> wakers_;  // one per reader inside; protected by the table's mutex
};
using LeasePtr = std::shared_ptr<Lease>;

/// All methods may be called from any thread.
class LeaseTable {
 public:
  /// `changed` is called (without a lock held) when a half may have become idle.
  explicit LeaseTable(std::function<void()> changed) : changed_(std::move(changed)) {}

  /// Permission to read the half. Valid until may_send() says no, which is to be asked before each piece.
  class Reader : public net::MessageStream::MaySend {
   public:
    Reader(Reader&& other) noexcept;
    Reader& operator=(Reader&&) = delete;
    ~Reader() override;
    bool may_send() const override { return lease_->live(); }

   private:
    friend class LeaseTable;
    Reader(LeaseTable& table, LeasePtr lease, std::list<std::function<void()>>::iterator waker)
        : table_(&table), lease_(std::move(lease)), waker_(waker) {}
    LeaseTable* table_;
    LeasePtr lease_;
    std::list<std::function<void()>>::iterator waker_;
  };

  LeasePtr begin(const HalfKey& key, LeaseTerms terms = {});
  /// Ends a lease; no more readers enter. Harmless when it has ended.
  void end(Lease& lease);
  /// lease_revoked if the lease has ended. `wake` must make the reader look at may_send() again; called from any
  /// thread, under the table's lock, so it may only post.
  Result<Reader> enter(const LeasePtr& lease, std::function<void()> wake);

  /// Ends every lease on this content whose grace is not longer than `waited`; returns those that lived.
  std::vector<LeasePtr> revoke(const HalfKey& key, std::chrono::nanoseconds waited = std::chrono::nanoseconds::max());
  /// Nothing of ours reads this content or may begin to.
  bool idle(const HalfKey& key) const;
  bool generation_idle(std::uint64_t generation) const;

  struct Count {
    HalfKey key;
    bool live = false;
    std::size_t readers = 0;
  };
  std::vector<Count> list() const;

 private:
  void end_locked(Lease& lease);
  void leave(Reader& reader);
  void drop_finished_locked();

  const std::function<void()> changed_;
  mutable std::mutex mutex_;
  std::list<LeasePtr> leases_;  // protected by mutex_: live ones, and ended ones with readers inside
};

}  // namespace deltasync::agent
