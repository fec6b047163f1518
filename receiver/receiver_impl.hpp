// The receiver behind include/deltasync/receiver.hpp. Tests make it with their own tuning.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/cpu_list.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"
#include "format/packed_layout.hpp"
#include "receiver/bound_target.hpp"
#include "receiver/pull/pull.hpp"
#include "receiver/standing.hpp"

namespace deltasync::receiver {

class ReceiverImpl final : public BoundTarget {
 public:
  /// To the endpoint with number `first` of those in `options`; to the others once that is lost.
  static Result<std::unique_ptr<ReceiverImpl>> connect(ReceiverOptions options, const Tuning& tuning,
                                                       const CallContext& until, std::size_t first = 0);
  ~ReceiverImpl() override;

  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions& call = {}) override;
  Result<bool> is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call = {}) override;
  Lag lag(const CallOptions& call = {}) const override;
  std::pair<std::uint64_t, std::uint64_t> progress() const override { return progress_.look(); }
  using Receiver::repair;
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions& call = {}) override;

  // For a receiver of parts, which has one of these for each member.
  /// A full update that is staged is one that was pulled in part again: the next pull goes on from its tiles.
  void unstage();
  using BoundTarget::bind_tiles;
  using BoundTarget::drop_unfinished;
  /// Tells the agent, too.
  void note_standing(const Error* failure) override;
  /// What the agent serves now: with another one than sidecar() it may be another trainer's. layout_mismatch: it serves
  /// another layout.
  Result<Sidecar> sidecar_now(const CallContext& until);
  /// Connected to its agent, after as many attempts as there is time for.
  Status is_there(const CallContext& until);
  /// The version that pull() would bring now; nothing is transferred.
  Result<Version> target_version(const Want& want, const CallContext& until);
  /// Whether `want` means this version, with this root of the kept tiles.
  Result<bool> means(const std::pair<VersionId, Digest128>& version, const Want& want, const CallContext& until);

  std::shared_ptr<const ReceiverStatus> status() const override { return standing_; }
  std::uint64_t agent_instance() const { return control_.instance(); }
  void note_served(const Status& served) override;

 private:
  ReceiverImpl(ReceiverOptions options, const CpuList& cores, Peer peer);

  Result<wire::UnpackedLayout> fetch_layout(const CallContext& until);
  Status target_bound(const CallContext& /*until*/) override {
    scrubs_ = 0;
    return {};
  }
  void discard_full() override;
  void full_is_committed() override { partial_ = PartialUpdate(); }
  Session session(PartialUpdate& partial, bool& invalidated);
  Result<std::unique_ptr<StagedUpdate>> pull_directory(const std::filesystem::path& directory,
                                                       const CallContext& until);
  Result<Prepared> read_directory(const std::filesystem::path& directory, const CallContext& until);
  Result<RepairReport> repair_listed(std::span<const std::uint64_t> tiles, const CallContext& until);
  Status repair_tiles(const Ranges& tiles, const CallContext& until, RepairReport& report);
  Status repair_and_attest(const Ranges& tiles, const CallContext& until, RepairReport& report);

  const Peer peer_;
  const std::shared_ptr<Standing> standing_;
  Control control_;
  ThreadPool stream_pool_;  // one thread a stream
  ThreadPool pool_;         // for everything else
  Streams streams_;
  LinkMeter link_;
  TransferMeter progress_;
  LocalPulls local_;
  std::uint64_t changed_last_ = 0;
  std::vector<delta::Batch> batches_;
  PartialUpdate partial_;
  std::uint64_t scrubs_ = 0;
};

/// Receiver::connect() with a tuning of its own.
Result<std::unique_ptr<Receiver>> connect(const ReceiverOptions& options, const Tuning& tuning,
                                          const CallContext& until);

}  // namespace deltasync::receiver
