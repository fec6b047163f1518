// The receiver behind include/deltasync/receiver.hpp. Tests make it with their own tuning.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/cpu_list.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/attest.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/shadow.hpp"
#include "receiver/pull.hpp"
#include "receiver/standing.hpp"

namespace deltasync::receiver {

class StagedImpl;

/// The target's waits end with a call, as long as it lasts (Target::begin_pull).
class OnTarget {
 public:
  OnTarget(Target& target, const Until& until) : target_(target) { target_.begin_pull(until); }
  ~OnTarget() { target_.end_pull(); }
  OnTarget(const OnTarget&) = delete;
  OnTarget& operator=(const OnTarget&) = delete;

 private:
  Target& target_;
};

class ReceiverImpl final : public Receiver {
 public:
  static Result<std::unique_ptr<ReceiverImpl>> connect(ReceiverOptions options, const Tuning& tuning, Deadline deadline,
                                                       std::stop_token stop = {});
  ~ReceiverImpl() override;

  const LayoutPtr& layout() const override { return layout_; }
  const Sidecar& sidecar() const override { return sidecar_; }
  using Receiver::bind;
  Status bind(TargetPtr target, const Subscription& subscription, Deadline deadline,
              std::stop_token stop = {}) override;
  Target* target() override { return target_.get(); }
  const Subscription& subscription() const override { return subscription_; }
  FullOverLive full_over_live() const override { return options_.full_over_live; }
  bool takes_commits_back() const override;
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, Deadline deadline, std::stop_token stop = {}) override;
  std::optional<Version> current() const override;
  Lag lag(Deadline deadline, std::stop_token stop = {}) const override;
  std::shared_ptr<const Standing> standing() const { return standing_; }
  std::uint64_t agent_instance() const { return control_.instance(); }
  /// See receiver/standing.hpp.
  void note_served(const Status& served);
  /// See deltasync/still_wanted.hpp.
  Result<bool> still_wanted(const StagedUpdate& staged, const Want& want, const Until& until);
  /// See deltasync/attest.hpp.
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const Until& until);
  /// See deltasync/shadow.hpp.
  Status give_up_live(const Until& until);
  Result<RestoreReport> restore_live(const Until& until);

 private:
  friend class StagedImpl;
  ReceiverImpl(ReceiverOptions options, const CpuList& cores, Peer peer);

  Status fetch_layout(const Until& until);
  void close_staged();
  void discard_full();
  /// The target has lost its version: what is staged leads nowhere, and what a pull holds may be gone with it.
  void forget_unfinished();
  Session session(PartialUpdate& partial, bool& invalidated);
  /// After whatever may have changed what is committed, or has failed: tells the agent. Null: it succeeded.
  void note_standing(const Error* failure);
  Status attest_or_invalidate(Target& target, const Until& until) const;
  Status repair_tiles(const Ranges& tiles, const Until& until, RepairReport& report);
  Status repair_and_attest(const Ranges& tiles, const Until& until, RepairReport& report);

  const ReceiverOptions options_;
  const Peer peer_;
  const std::shared_ptr<Standing> standing_;
  Control control_;
  ThreadPool stream_pool_;  // one thread a stream
  ThreadPool pool_;         // for everything else
  Streams streams_;
  LinkMeter link_;
  std::uint64_t changed_last_ = 0;
  LayoutPtr layout_;
  Sidecar sidecar_;
  std::vector<delta::Batch> batches_;
  TargetPtr target_;
  Subscription subscription_;
  TileSet tiles_;  ///< that it keeps
  PartialUpdate partial_;
  std::uint64_t scrub_cursor_ = 0;
  std::uint64_t older_told_ = 0;
  bool invalidated_ = false;
  StagedImpl* staged_ = nullptr;  // the last pull's, while it lives and no later pull has begun
};

/// Belongs to the caller. The receiver cuts it loose when the next pull begins or the receiver ends.
class StagedImpl final : public StagedUpdate {
 public:
  StagedImpl(ReceiverImpl& receiver, Prepared prepared);
  ~StagedImpl() override;

  const PullReport& report() const override { return prepared_.report; }
  using StagedUpdate::commit;
  Status commit(Deadline deadline) override;
  Status rollback() override;

 private:
  friend class ReceiverImpl;
  enum class Phase : std::uint8_t { staged, committed, dropped };

  void drop();
  Status commit_staged(Deadline deadline);
  Status attest(const Until& until);
  Status check_attached() const;

  ReceiverImpl* receiver_;
  Prepared prepared_;
  Phase phase_ = Phase::staged;
  bool invalidated_before_ = false;  ///< what the commit replaced: who rolls it back has that again
};

}  // namespace deltasync::receiver
