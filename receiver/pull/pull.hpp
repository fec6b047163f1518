// One pull, from the first plan to a verified update: which plans to ask for, and what to do when one ends early.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/call_context.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/bound_target.hpp"
#include "receiver/control.hpp"
#include "receiver/link.hpp"
#include "receiver/local/local_half.hpp"
#include "receiver/pull/fetch.hpp"
#include "receiver/pull/partial_update.hpp"
#include "receiver/pull/streams.hpp"
#include "receiver/pull/transfer_meter.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::receiver {

/// What a pull works with; all of it belongs to the receiver and outlives the pull.
struct Session {
  const Peer& peer;
  const ReceiverOptions& options;
  const Layout& layout;
  const Sidecar& sidecar;
  const std::vector<delta::Batch>& batches;
  const TileSet& tiles;  ///< that are subscribed to
  Control& control;
  Streams& streams;
  ThreadPool& pool;
  LinkMeter& link;
  TransferMeter& progress;
  LocalPulls& local;
  std::uint64_t& changed_last;  ///< elements that the last delta changed; 0: none came yet
  Target& target;
  const TargetCapabilities can;  ///< the target's
  PartialUpdate& partial;
  std::uint64_t& scrubs;  ///< how many there were of this target
  OlderEpochs& older_epochs;
  bool& invalidated;           ///< live memory was found to differ from its digests: only a full pull helps
  const VersionId& last_held;  ///< what was committed last, also once it is lost; epoch 0: nothing
};

class Pull {
 public:
  /// The session's control conversation has to end by the same stop.
  Pull(Session session, const Want& want, CallContext until);

  /// See Receiver::pull.
  Result<Prepared> run();
  /// After run() has failed: nothing went wrong. A stop ended it, or nothing that is wanted came until the deadline, or
  /// for as long as Want::wait_max.
  bool ended_early() const { return ended_early_; }
  /// Fetches tiles of the version that is committed and repairs them in the target, which is open for that. Of the
  /// report: what came. For a session of its own, that takes what the target has for invalid and holds nothing.
  Result<PullReport> repair(const Ranges& tiles);
  /// What run() would bring now; nothing is transferred. Waits as it does.
  Result<Version> target();
  /// Whether what is wanted is this version, to the agent as it is now; see Receiver::is_current().
  Result<bool> means(const VersionId& version, const Digest128& root);

 private:
  /// Whole, or the plan ended early and another one is due.
  enum class Progress : std::uint8_t { whole, replan };

  // planning (pull_plan.cpp)
  Result<wire::PlanReply> plan();
  Deadline wait_by() const;
  Status keep_waiting();
  Answer<wire::PlanReply> ask(const wire::PlanRequest& question);
  Status look_at_parents();
  void tell_cut_off();
  /// What is committed, or being brought.
  VersionId held() const;
  /// What a full transfer moves, as the agent computes it.
  std::uint64_t full_bytes() const { return s_.tiles.is_whole() ? s_.layout.half_bytes() : s_.tiles.bytes(); }
  wire::PlanRequest plan_request() const;
  bool wants_compact() const;
  Status check_reply(const wire::PlanReply& reply, bool partial) const;
  /// Another version cannot take the place of the one that is wanted, so a full update may not lead to it.
  bool version_is_named() const { return want_.number || !want_.label.empty(); }
  std::uint64_t delta_bytes_max() const;
  bool delta_is_too_large(const wire::PlanReply& reply) const;
  bool changes_are_too_many(const wire::PlanReply& reply) const;
  /// Whether to take what the agent serves, as ReceiverOptions::on_older_epoch says: whole stands for yes.
  Result<Progress> look_at_epoch(const wire::PlanReply& reply);
  bool is_of_older_epoch(const wire::PlanReply& reply) const;
  bool is_before_ours(const wire::PlanReply& reply) const;
  bool reply_means_wait(const wire::PlanReply& reply) const;
  bool is_before_what_was_lost(const wire::PlanReply& reply) const;

  // delta (pull_delta.cpp)
  Result<Progress> run_delta(const wire::PlanReply& reply);
  Result<Progress> collect_frames(const wire::PlanReply& reply, std::vector<StagedStep>& steps,
                                  std::vector<std::uint64_t>& digests);
  Status verify_chains(const std::vector<StagedStep>& steps, std::vector<std::uint64_t>& digests);
  Status scrub();

  // full (pull_full.cpp)
  Result<Progress> run_full(const wire::PlanReply& reply);
  Result<Progress> check_side_files();
  Status open_full();
  Status reread_partial();
  Result<Progress> advance_partial(const wire::PlanReply& reply, std::span<const std::uint64_t> target_digests);
  Result<Progress> advance_one_step(const wire::PlanReply& reply, std::uint32_t step, const Ranges& ranges);
  void adopt_digests(const wire::PlanReply& reply, std::vector<std::uint64_t> digests);
  /// The subscribed tiles that we do not have.
  Ranges missing() const;
  Result<Progress> fetch_missing(const wire::PlanReply& reply);
  Result<Progress> fetch_bands(const wire::PlanReply& reply, const Ranges& bands);
  Result<Progress> fetch_plain(const wire::PlanReply& reply, const Ranges& ranges);
  Result<Progress> fetch_raw(const wire::PlanReply& reply, const Ranges& ranges, std::uint64_t items,
                             FrameFetch::Kind kind = FrameFetch::Kind::raw_tiles);
  Result<Progress> repair_missing(const wire::PlanReply& reply);

  // from the agent's memory (pull_local.cpp)
  /// Nothing: they come over the connection.
  Result<std::optional<Progress>> fetch_local(const wire::PlanReply& reply, const Ranges& ranges);
  Result<Progress> copy_from(const LocalHalf& half, const Ranges& ranges);
  void hand_on(const Ranges& ranges);
  Result<bool> copy_tile(const LocalHalf& half, std::uint64_t index, std::vector<std::byte>& scratch);

  // single tiles (receiver/repair.cpp)
  Result<Progress> repair_from(const wire::PlanReply& reply);
  Status put(const Tile& tile, const TileRows& rows) {
    return repairing_ ? s_.can.repair->repair_tile(tile, rows) : s_.target.put_tile(tile, rows);
  }

  // wrong tiles (pull_doubt.cpp)
  /// Any thread.
  void doubt(std::uint64_t tile);
  /// Whether the doubted tiles are wrong at the agent, or its version another one by now: another plan is due.
  Result<bool> agent_was_wrong(const wire::PlanReply& reply);

  // packed forms (pull_packed.cpp)
  /// The agent is another host.
  bool far() const;
  /// Fetches the first of these tiles as they are, as many as it takes to know the link, and drops them from `rest`.
  Result<Progress> probe_link(const wire::PlanReply& reply, Ranges& rest);
  Result<Progress> fetch_packed(const wire::PlanReply& reply, const Ranges& ranges);
  /// True if these tiles are there sooner if they come packed.
  bool packing_pays(const wire::PlanReply& reply, const Ranges& ranges) const;
  /// A transfer of a half's bytes shows how fast the link is; one of packed tiles how fast at least, and whether
  /// streams broke for it.
  void learn(const FetchRoundResult& round, bool packed);

  /// Adds what a round did to the report; true if any tile arrived.
  bool count(const FetchRoundResult& round, std::span<const StreamTally> tallies);
  /// Counts, and says how to go on.
  Result<Progress> settle(const FetchRoundResult& round, std::span<const StreamTally> tallies);
  Error stopped(Error error);
  Error out_of_time() const;
  bool waited_in_vain(const Error& error) const;
  std::uint64_t bytes_received() const { return s_.control.bytes_received() + s_.streams.bytes_received(); }

  const Session s_;
  const Want want_;
  const CallContext until_;
  const std::uint64_t bytes_before_;
  std::string stage_ = "connecting";
  std::optional<Error> last_;  // why the last plan ended early
  std::uint32_t refused_plans_ = 0;
  Backoff replan_backoff_;
  Backoff busy_backoff_;
  std::chrono::milliseconds pause_{0};  ///< before the next plan, when the one at hand is released
  bool full_only_;
  bool ended_early_ = false;
  Deadline wait_by_;                 ///< for the agent to have what is wanted; never after the deadline
  std::optional<Deadline> lost_by_;  ///< for the agent to have what was held and is lost
  bool waited_enough_ = false;       ///< that has passed
  bool waiting_ = false;             ///< for the agent to have what is wanted
  bool plain_only_ = false;          // no exponent classes in this pull: undoing them would take too much memory
  bool compact_ = false;             // the plan at hand asked for them
  bool repairing_ = false;           // tiles go into the committed version
  bool connection_only_ = false;     // nothing came of a local copy
  bool plain_tiles_only_ = false;    // streams broke while tiles were packed: the agent may have no time for it
  std::mutex doubted_mutex_;         // held by streams; none runs where the tiles are looked at
  std::set<std::uint64_t> doubted_;  // tiles that came and could not be verified
  Prepared out_;
  std::uint64_t payload_bytes_ = 0;
};

}  // namespace deltasync::receiver
