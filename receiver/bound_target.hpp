// What a receiver does with the target that is bound to it, from wherever the versions come.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"
#include "format/tile_set.hpp"
#include "receiver/older_epoch.hpp"
#include "receiver/standing.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::receiver {

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

double seconds_since(std::chrono::steady_clock::time_point start);
/// invalid_argument: a number and a label, or what is no label.
Status check_want(const Want& want);

/// A verified update, ready for the target's commit.
struct Prepared {
  PullReport report;
  TargetState state;              ///< for delta and full
  std::vector<StagedStep> steps;  ///< for delta
};

class StagedImpl;

class BoundTarget : public Receiver {
 public:
  const LayoutPtr& layout() const override { return layout_; }
  const Sidecar& sidecar() const override { return sidecar_; }
  using Receiver::bind;
  Status bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) override;
  Target* target() override { return target_.get(); }
  const std::vector<Slice>& slices() const override { return slices_; }
  FullUpdatePolicy full_update_policy() const override { return options_.full_update_policy; }
  bool supports_rollback() const override;
  std::optional<Version> current() const override;
  Result<std::vector<TileMismatch>> attest(const CallOptions& call = {}) override;
  Status release(const CallOptions& call = {}) override;
  Result<RepairReport> restore(const CallOptions& call = {}) override;
  virtual std::shared_ptr<const ReceiverStatus> status() const = 0;
  /// Of wait_served() in receiver/standing.hpp.
  virtual void note_served(const Status& served) = 0;

 protected:
  BoundTarget(ReceiverOptions options, ThreadPool& pool)
      : options_(std::move(options)), target_pool_(pool), older_epochs_(options_.on_older_epoch) {}

  /// A target that keeps these tiles.
  Status bind_tiles(std::unique_ptr<Target> target, TileSet tiles, const CallContext& until);
  /// For the caller of pull(): the last one, while it lives and no later pull has begun.
  std::unique_ptr<StagedUpdate> stage(Prepared prepared);
  void close_staged();
  /// What a staged full update leads to, which is given up as such: its tiles stay. Nothing: none is staged.
  std::optional<TargetState> take_staged_full();
  /// The target has lost its version: what is staged leads nowhere, and what a pull holds may be gone with it.
  void forget_unfinished();
  /// What is staged or half pulled is given up.
  void drop_unfinished() {
    close_staged();
    discard_full();
  }
  /// A full update that is open in the target, or not, is given up.
  virtual void discard_full() = 0;
  /// The target has committed it: nothing is open.
  virtual void full_is_committed() = 0;
  /// After whatever may have changed what is committed, or has failed. Null: it succeeded.
  virtual void note_standing(const Error* failure) = 0;
  /// Of a pull that begins: invalid_argument if there is nothing that it could write.
  Status check_pullable() const;
  /// Whether versions can be fetched that nobody sends now.
  virtual bool fetches() const { return true; }
  /// After bind() has the target.
  virtual Status target_bound(const CallContext& /*until*/) { return {}; }

  const ReceiverOptions options_;
  ThreadPool& target_pool_;  ///< of the receiver
  OlderEpochs older_epochs_;
  LayoutPtr layout_;
  Sidecar sidecar_;
  std::unique_ptr<Target> target_;
  std::vector<Slice> slices_;
  TileSet tiles_;             ///< that it keeps
  bool released_ = false;     ///< live memory is, of which no copy was kept
  bool had_version_ = false;  ///< since the target was bound
  bool invalidated_ = false;  ///< live memory was found to differ from its digests: only a full pull helps
  VersionId last_held_;       ///< what was committed last, also once live memory has lost it; epoch 0: nothing
  StagedImpl* staged_ = nullptr;

 private:
  void note_held();
  friend class StagedImpl;
  Status release_live(const CallContext& until);
  Result<RepairReport> restore_live(CanSleep& can, const CallContext& until);
  Result<RepairReport> restore_by_pull(const CallOptions& call);
  Status attest_or_invalidate(const CallContext& until) const;
};

/// Belongs to the caller. The receiver cuts it loose when the next pull begins or the receiver ends.
class StagedImpl final : public StagedUpdate {
 public:
  StagedImpl(BoundTarget& receiver, Prepared prepared);
  ~StagedImpl() override;

  const PullReport& report() const override { return prepared_.report; }
  bool is_staged() const noexcept override { return receiver_ != nullptr && phase_ == Phase::staged; }
  Status commit(const CallOptions& call) override;
  Status rollback() override;

 private:
  friend class BoundTarget;
  enum class Phase : std::uint8_t { staged, committed, dropped };

  void drop();
  Status wait_for_engine(const CallContext& until);
  Status commit_staged(Deadline deadline, std::chrono::steady_clock::time_point start);
  Status attest(const CallContext& until);
  Status check_attached() const;

  BoundTarget* receiver_;
  Prepared prepared_;
  Phase phase_ = Phase::staged;
  bool invalidated_before_ = false;  ///< what the commit replaced: who rolls it back has that again
};

}  // namespace deltasync::receiver
