// How a receiver stands: what it has committed, and how its last attempt ended. Written by the thread that calls the
// receiver; read by any, while that one pulls.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/call_context.hpp"
#include "deltasync/receiver.hpp"
#include "format/wire_report.hpp"
#include "receiver/peer.hpp"

namespace deltasync::receiver {

/// What is committed is not served on, and since when.
struct Unserved {
  std::string why;
  std::chrono::steady_clock::time_point since;
};

/// What others look at while the receiver works. Thread-safe; may outlive its receiver, and says then what was last.
class ReceiverStatus {
 public:
  virtual ~ReceiverStatus() = default;
  /// See Receiver::lag.
  virtual Lag lag(const CallContext& until) const = 0;
  virtual std::optional<Unserved> unserved() const = 0;
  /// Of the last pull or commit, if that failed, or why what is committed is not served on. Empty: neither.
  virtual std::string last_error() const = 0;
};

class Standing final : public ReceiverStatus {
 public:
  /// `receiver`: a random number, by which the agent knows it over its connections.
  Standing(std::uint64_t receiver, Peer agent) : agent_(std::move(agent)) { report_.receiver = receiver; }

  void set(Version committed, std::string error) {
    const std::lock_guard lock(mutex_);
    report_.committed = std::move(committed);
    report_.error = std::move(error);
  }
  /// That what is committed is not served on (a relay's), and why; empty: it is, or nobody serves it on. It comes
  /// before errors of pulls: those end with the next version, this one does not.
  void set_unserved(std::string why) {
    const std::lock_guard lock(mutex_);
    if (unserved_.empty()) unserved_since_ = Clock::now();
    unserved_ = std::move(why);
  }
  wire::Report report() const {
    const std::lock_guard lock(mutex_);
    wire::Report report = report_;
    if (!unserved_.empty()) report.error = unserved_;
    return report;
  }
  std::optional<Unserved> unserved() const override {
    const std::lock_guard lock(mutex_);
    if (unserved_.empty()) return std::nullopt;
    return Unserved{unserved_, unserved_since_};
  }
  Lag lag(const CallContext& until) const override;
  std::string last_error() const override { return report().error; }

 private:
  using Clock = std::chrono::steady_clock;

  void recall(Lag& lag) const;

  const Peer agent_;
  mutable std::mutex mutex_;
  wire::Report report_;  // protected by mutex_, as what follows
  std::string unserved_;
  Clock::time_point unserved_since_;
  mutable std::optional<Version> heard_newest_;  ///< when the agent was asked last and answered
  mutable Clock::time_point heard_at_;
};

/// Of a receiver that Receiver::connect made; null of any other kind.
std::shared_ptr<const ReceiverStatus> status_of(const Receiver& receiver);
/// Waits until what the receiver has committed is served on, by the agent that its target hands it to (a relay's). Why
/// it is not is such a receiver's last_error (Receiver::lag, the status of the agent that it pulls from) until a later
/// call finds that it is. While no version comes nobody else looks: a caller that waits for one with Want::wait_max
/// looks in between. By the thread that calls the receiver, between its calls.
///
/// Errors: those of CanHandOn::wait_served; invalid_argument of another kind of target.
Status wait_served(Receiver& receiver, const CallContext& until);
/// The agent process that such a receiver is connected to, as wire::Hello::instance; 0 of any other kind, and of one
/// that is connected to several.
std::uint64_t agent_instance_of(const Receiver& receiver);

}  // namespace deltasync::receiver
