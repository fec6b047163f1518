// The receiver behind include/deltasync/receiver.hpp. Tests make it with their own tuning.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/cpu_list.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"
#include "receiver/pull/pull.hpp"
#include "receiver/standing.hpp"

namespace deltasync::receiver {

class StagedImpl;

/// The target's waits end with a call, as long as it lasts.
class OnTarget {
 public:
  OnTarget(Target& target, const CallContext& until) : devices_(target.capabilities().devices) {
    if (devices_ != nullptr) devices_->begin_pull(until);
  }
  ~OnTarget() {
    if (devices_ != nullptr) devices_->end_pull();
  }
  OnTarget(const OnTarget&) = delete;
  OnTarget& operator=(const OnTarget&) = delete;

 private:
  WaitsForDevices* const devices_;  ///< null: it has no such waits
};

class ReceiverImpl final : public Receiver {
 public:
  static Result<std::unique_ptr<ReceiverImpl>> connect(ReceiverOptions options, const Tuning& tuning,
                                                       const CallContext& until);
  ~ReceiverImpl() override;

  const LayoutPtr& layout() const override { return layout_; }
  const Sidecar& sidecar() const override { return sidecar_; }
  using Receiver::bind;
  Status bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) override;
  Target* target() override { return target_.get(); }
  const std::vector<Slice>& slices() const override { return slices_; }
  FullUpdatePolicy full_update_policy() const override { return options_.full_update_policy; }
  bool supports_rollback() const override;
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions& call = {}) override;
  Result<bool> is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call = {}) override;
  std::optional<Version> current() const override;
  Lag lag(const CallOptions& call = {}) const override;
  std::pair<std::uint64_t, std::uint64_t> progress() const override { return progress_.look(); }
  Result<std::vector<TileMismatch>> attest(const CallOptions& call = {}) override;
  using Receiver::repair;
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions& call = {}) override;
  Status release(const CallOptions& call = {}) override;
  Result<RepairReport> restore(const CallOptions& call = {}) override;
  std::shared_ptr<const Standing> standing() const { return standing_; }
  std::uint64_t agent_instance() const { return control_.instance(); }
  /// Of wait_served() in receiver/standing.hpp.
  void note_served(const Status& served);

 private:
  friend class StagedImpl;
  ReceiverImpl(ReceiverOptions options, const CpuList& cores, Peer peer);

  Status fetch_layout(const CallContext& until);
  void close_staged();
  void discard_full();
  /// The target has lost its version: what is staged leads nowhere, and what a pull holds may be gone with it.
  void forget_unfinished();
  Session session(PartialUpdate& partial, bool& invalidated);
  /// After whatever may have changed what is committed, or has failed: tells the agent. Null: it succeeded.
  void note_standing(const Error* failure);
  Result<bool> means(const StagedUpdate& staged, const Want& want, const CallContext& until);
  Result<RepairReport> repair_listed(std::span<const std::uint64_t> tiles, const CallContext& until);
  Status release_live(const CallContext& until);
  Result<RepairReport> restore_live(const CallContext& until);
  Status attest_or_invalidate(const CallContext& until) const;
  Status repair_tiles(const Ranges& tiles, const CallContext& until, RepairReport& report);
  Status repair_and_attest(const Ranges& tiles, const CallContext& until, RepairReport& report);

  const ReceiverOptions options_;
  const Peer peer_;
  const std::shared_ptr<Standing> standing_;
  Control control_;
  ThreadPool stream_pool_;  // one thread a stream
  ThreadPool pool_;         // for everything else
  Streams streams_;
  LinkMeter link_;
  TransferMeter progress_;
  std::uint64_t changed_last_ = 0;
  LayoutPtr layout_;
  Sidecar sidecar_;
  std::vector<delta::Batch> batches_;
  std::unique_ptr<Target> target_;
  std::vector<Slice> slices_;
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
  Status commit(const CallOptions& call) override;
  Status rollback() override;

 private:
  friend class ReceiverImpl;
  enum class Phase : std::uint8_t { staged, committed, dropped };

  void drop();
  Status commit_staged(Deadline deadline);
  Status attest(const CallContext& until);
  Status check_attached() const;

  ReceiverImpl* receiver_;
  Prepared prepared_;
  Phase phase_ = Phase::staged;
  bool invalidated_before_ = false;  ///< what the commit replaced: who rolls it back has that again
};

}  // namespace deltasync::receiver
