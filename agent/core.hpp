// The agent's state: generations of the segment, what is served, the ring of deltas, plans and leases; the publisher,
// the one thread that moves halves through their states; and the two threads that merge and compact deltas. No sockets
// here.
//
// Invariants:
//   - A half goes back to the writers only when the diff that read it is done and no lease on that content lives and
//     no Reader is inside (LeaseTable::idle), and after no new lease on it can begin: a lease is begun under the
//     core's mutex on the snapshot's half, and the snapshot has moved on by then.
//   - What a snapshot says never changes: receivers plan against one moment.
//   - A ring entry's `to` chain ends at the served version of the same layout.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/derive/derived_delta_cache.hpp"
#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/plans/lease_budgets.hpp"
#include "agent/plans/planner.hpp"
#include "agent/plans/subset.hpp"
#include "agent/room.hpp"
#include "agent/serve/pack_pool.hpp"
#include "agent/trainer/trainer_server.hpp"
#include "agent/versions/generation.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/overlapped_diff.hpp"
#include "agent/versions/publications.hpp"
#include "agent/versions/reclaimer.hpp"
#include "agent/versions/ring.hpp"
#include "agent/versions/ring_keeper.hpp"
#include "agent/versions/scrub.hpp"
#include "agent/versions/suspects.hpp"
#include "base/thread_pool.hpp"
#include "shm/segment.hpp"

namespace deltasync::agent {

/// A version that receivers get: its half, and the digests fixed when it was published.
struct ServedVersion {
  GenerationPtr generation;
  HalfKey half;
  Version version;
  Digest128 root;
  std::shared_ptr<const std::vector<std::uint64_t>> digests;
  /// What it was published with before digests of damaged tiles were taken again, the oldest first; few.
  std::vector<FormerState> former;
  std::chrono::steady_clock::time_point published_at;
  bool found_at_start = false;  ///< in a segment that an agent before this one left: published_at is no more than that
  // What making it cost; zero for the first of a generation.
  std::uint64_t delta_bytes = 0;
  std::uint64_t changed = 0;
  double encode_s = 0;
  double digest_s = 0;

  /// Of which bytes other than those that were offloaded are served, ascending.
  std::vector<std::uint64_t> damaged_tiles() const;
};
using ServedPtr = std::shared_ptr<const ServedVersion>;

/// Copies tiles of a served half to `out`, contiguous, their rows without padding. Takes no lease, so that no writer
/// waits for a thread of low priority. False if the half was given back to the writers meanwhile: then what is in `out`
/// is of no use.
bool copy_while_served(const ServedVersion& served, std::span<const std::uint64_t> tiles, std::byte* out);

/// Epochs beyond this are not believed when a receiver names them: a quarter of the counting bits, which leaves 3·10⁹
/// trainers to come. (Epochs that older releases made from a clock reach it in the year 2109.)
inline constexpr std::uint64_t kEpochHeardMax = std::uint64_t{1} << 62;

/// Everything that a plan is made from, at one moment.
struct Snapshot {
  GenerationPtr generation;  ///< whose layout receivers get; null: no trainer has come yet
  ServedPtr served;          ///< null: no version yet
  std::vector<RingEntryPtr> ring;
  Offer offer;  ///< the same for the planner
};
using SnapshotPtr = std::shared_ptr<const Snapshot>;

/// A plan that a receiver was given: what its data requests may ask for. Immutable, but for the state of its leases.
struct OpenPlan {
  std::uint64_t id = 0;
  std::uint64_t connection = 0;  ///< the control conversation that it ends with
  wire::PlanMode mode = wire::PlanMode::delta;
  LayoutPtr layout;
  ServedPtr served;     ///< full only
  LeasePtr lease;       ///< full only: on the half
  bool copied = false;  ///< full only: extents are copied out of it first, so that no writer waits for them
  std::shared_ptr<PackedFrameCache> packed_frames;  ///< full only: of all such plans of this half
  LeasePtr hold;                                    ///< on everything else, from the plan's beginning to its end
  std::vector<RingEntryPtr> steps;                  ///< oldest first
  SubsetPtr subset;                                 ///< the tiles that it is about; null: all
  std::chrono::steady_clock::time_point opened_at;
  std::chrono::steady_clock::time_point expires_at;

  VersionId target() const { return served ? served->version.id : steps.back()->to.id; }
};
using OpenPlanPtr = std::shared_ptr<const OpenPlan>;

/// A plan request that waits for a derived delta. It is tried again whenever something changes; this is what the tries
/// have in common. Owned by the conversation that made the request.
struct PendingPlan {
  bool may_wait = false;  ///< its time to wait has not passed
  // Written by the core.
  std::optional<DeltaKey> key;         ///< waits for this one and no other, so that a fast trainer cannot hold it up
  DerivedDeltaCache::Request request;  ///< for `key`, until the waiting ends
  bool began = false;                  ///< it was the first to ask for `key`
  bool hit = false;                    ///< a delta that another request had asked for answers it
  /// The plan that it could have had at once, of steps of the ring. Opened when the waiting began, so that the steps
  /// stay available if they leave the ring meanwhile.
  std::optional<wire::PlanReply> chain;
};

/// Who asks for a plan.
struct Asker {
  std::uint64_t connection = 0;
  std::string host;  ///< the peer's address without its port; lease budgets are by host
  std::string name;  ///< for the log
};

class AgentCore : public TrainerHooks {
 public:
  /// Takes the lock of `options.name`, adopts what an agent before left and starts the publisher. Errors:
  /// already_exists (another agent), permission, io.
  static Result<std::unique_ptr<AgentCore>> start(const CoreOptions& options);
  /// Joins the threads. The segment stays.
  ~AgentCore() override;
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  // ---- TrainerHooks ------------------------------------------------------------------------------------------
  Result<OpenSegment> open_segment(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                   const ProcessId& asker) override;
  Result<std::uint64_t> grant(std::uint64_t generation, std::uint32_t slot, std::uint32_t writers,
                              ProcessWatch watch) override;
  void writer_gone(std::uint64_t generation, std::uint32_t slot, std::uint64_t grant) override;
  void segment_changed() override;
  void offloaded(const wire::TrainerNotify& durations) override;
  Result<std::optional<wire::TrainerReady>> ready(const VersionId& version) override;

  // ---- the pull server's side; any thread ----------------------------------------------------------------------
  SnapshotPtr snapshot() const;
  /// One try to answer a plan request. Nothing if it has to wait: `waiting_for` says for what, and listeners hear of
  /// each change. A full answer has begun a lease. `pending` is the same for all tries of one request. `subset` has the
  /// tiles that the connection subscribed to and the request names; null: all tiles.
  Result<std::optional<wire::PlanReply>> plan(const wire::PlanRequest& plan, const Asker& asker,
                                              std::string* waiting_for, PendingPlan& pending,
                                              const SubsetPtr& subset = nullptr);
  /// A receiver says that it holds a version of this epoch. Any thread.
  void hear_of_epoch(std::uint64_t epoch);
  /// The Subset of these tiles: one object for all connections that ask for the same. no_space beyond the memory that
  /// peers may take.
  Result<SubsetPtr> share_subset(TileSet tiles);
  /// lease_revoked if the plan is over (released, expired, its control connection closed) or was never made.
  Result<OpenPlanPtr> find_plan(std::uint64_t id) const;
  /// As LeaseTable::enter, for the plan as a whole. Whatever sends what the plan holds (deltas that may have left the
  /// ring, a mapping) is such a Reader, and stops when the plan ends.
  Result<LeaseTable::Reader> enter(const OpenPlan& plan, std::function<void()> wake);
  void release(std::uint64_t plan, std::uint64_t connection);
  /// What a receiver has to do that could not verify tiles of its plan's target.
  enum class Verdict : std::uint8_t {
    valid,       ///< they have their digests here
    plan_again,  ///< there is another version by now, or another state of it
    not_yet,     ///< they are wrong, and will be published again soon: ask again when told of a change
  };
  Verdict check_tiles(const OpenPlan& plan, std::span<const wire::TileRange> ranges, const std::string& who);
  /// These tiles of a served half may be wrong: the publisher checks them soon.
  void doubt(const HalfKey& half, std::span<const std::uint64_t> tiles, const std::string& found_by);
  /// Ends all plans of a control conversation.
  void connection_closed(std::uint64_t connection);
  LeaseTable& leases() noexcept { return leases_; }
  PackPool& packers() noexcept { return packers_; }
  const Room& copy_room() const noexcept { return copy_room_; }
  /// Memory for peers: their requests, what waits to be sent to them, their subscriptions, and what is cached for
  /// others that may ask for the same.
  const Room& peer_room() const noexcept { return peer_room_; }
  /// Tiles of the largest layout that a request may be about.
  std::uint64_t tiles_max() const;
  Metrics& metrics() noexcept { return metrics_; }
  const CoreOptions& options() const noexcept { return options_; }

  /// `changed` is called (any thread, no lock held but the list's) after each publication and merge, for as long as
  /// the listener lives.
  using Listener = std::shared_ptr<void>;
  Listener listen(std::function<void()> changed);

  /// Ends plans that are past their time, and revokes leases that a writer has waited for long enough. Returns after
  /// which time to call it again.
  std::chrono::milliseconds run_maintenance();

  /// Stops the publisher and the packing threads and revokes all leases. Idempotent. Conversations may still be there.
  void stop();
  /// Removes the segments' files (tests).
  void remove_segments();
  /// Removes them too, of an agent whose end cannot be waited for. May outlive the core. It holds the lock of the
  /// agent's name, so nothing of another agent is removed.
  class Names {
   public:
    void remove() const noexcept;

   private:
    friend class AgentCore;
    std::shared_ptr<shm::AgentLock> lock_;
    std::shared_ptr<Reclaimer> reclaimer_;
  };
  Names names() const;

  // ---- for status ------------------------------------------------------------------------------------------------
  struct PlanInfo {
    std::uint64_t connection = 0;
    wire::PlanMode mode = wire::PlanMode::delta;
    VersionId target;
    bool live = true;
  };
  std::vector<PlanInfo> plans() const;
  /// How far a receiver that holds this version (epoch 0: none) is behind what is served.
  Behind behind(const VersionId& held) const;
  /// The same of many at one moment.
  std::vector<Behind> behind(std::span<const VersionId> held) const;
  std::vector<GenerationPtr> generations() const;
  std::uint64_t ring_bytes_max() const;
  struct DerivedInfo {
    struct Entry {
      Version from;
      Version to;
      std::uint64_t bytes = 0;
      std::uint64_t changed = 0;
      bool compact = false;
      double merge_s = 0;
      std::chrono::steady_clock::time_point made_at;
    };
    std::vector<Entry> entries;  ///< oldest first
    std::uint64_t bytes = 0;
    std::uint64_t bytes_max = 0;
    std::size_t wanted = 0;  ///< waiting, or being made
  };
  DerivedInfo derived() const;

 private:
  struct Listeners {
    std::mutex mutex;
    std::list<std::function<void()>> list;  // protected by mutex
  };

  AgentCore(const CoreOptions& options, shm::AgentLock lock);
  Status adopt_existing();
  Status sweep_stray_deltas();

  void look_at_names_locked(std::chrono::steady_clock::time_point now);

  // The publisher's thread.
  void publish_loop();
  bool maintain(const GenerationPtr& generation);
  void serve_first(const GenerationPtr& generation, const shm::HalfView& active);
  void serve_next(const ServedPtr& before, const shm::HalfView& sealed);
  void follow_fill(const ServedPtr& served);
  std::optional<delta::Delta> diff(const ServedPtr& before, const shm::HalfView& sealed,
                                   std::vector<std::uint64_t>& digests);
  /// `deltas` lead to it: they go on from those in the ring, or take their place.
  void install(ServedPtr served, std::vector<RingEntryPtr> deltas);
  // core_damage.cpp
  ScrubSource scrub_source();
  void look_at_suspects();
  void note_damage(const Layout& layout, const Version& version, std::uint64_t tile, const std::string& found_by);
  void publish_again(const ServedPtr& before, std::span<const std::uint64_t> wrong);
  std::optional<delta::Delta> repair_diff(const ServedVersion& before, const shm::HalfView& sealed, delta::Delta delta,
                                          std::vector<std::uint64_t>& digests);
  void drop_old_generations();
  void wait_for_work();

  // Under mutex_.
  void rebuild_snapshot_locked(GenerationPtr generation, ServedPtr served);
  void end_plan_locked(std::uint64_t id);
  void trim_pinned_locked();
  /// The tiles that a plan is about, and what there is for them.
  struct Share {
    SubsetPtr subset;  ///< null: all
    const Offer& offer;
    std::vector<RingEntryPtr>& unknown;  ///< whose parts have to be computed first
  };
  Result<std::optional<wire::PlanReply>> plan_locked(const wire::PlanRequest& plan, const Asker& asker,
                                                     std::string* waiting_for, PendingPlan& pending,
                                                     const Share& share);
  /// `steps`: of a delta, or listed with a full answer.
  Result<wire::PlanReply> open_plan_locked(const Decision& decision, std::vector<RingEntryPtr> steps,
                                           const Asker& asker, const Share& share);
  // core_subset.cpp
  Result<std::optional<wire::PlanReply>> plan_subset(const wire::PlanRequest& plan, const Asker& asker,
                                                     std::string* waiting_for, PendingPlan& pending,
                                                     const SubsetPtr& subset);
  static bool compute_subset_roots(const Share& share, const std::vector<RingEntryPtr>& steps);
  static Subset::Part part_of(const Share& share, const RingEntryPtr& entry);
  // core_derived.cpp. The steps that answer `decision`: one derived delta for as much of the chain as there is one for,
  // then the ring's own. Nothing: the request waits for one that is being built.
  std::optional<std::vector<RingEntryPtr>> derived_steps_locked(const Decision& decision, PendingPlan& pending);
  std::vector<RingEntryPtr> ring_steps_locked(const Decision& decision) const;
  std::optional<wire::PlanReply> take_chain_locked(PendingPlan& pending);
  void count_pull(wire::PlanMode mode);
  std::vector<RingEntryPtr> chain_locked(const DeltaKey& key) const;
  std::vector<DeltaKey> better_than(const Decision& decision, const std::vector<RingEntryPtr>& chain) const;
  void request_better_locked(const std::vector<DeltaKey>& better, PendingPlan& pending);
  bool put_derived_locked(std::vector<RingEntryPtr>& chain, bool compact) const;
  void retain_derived_locked();
  void release_entries_locked(std::vector<RingEntryPtr> entries);

  // The builders' threads. A null delta: there can be none, or it would not pay. An error: it may succeed another time.
  struct DeltaBuilder;
  struct Build;
  void start_builder(DeltaBuilder& builder, const std::string& name);
  void build_loop(DeltaBuilder& builder, ThreadPool& pool);
  void build_one(DeltaBuilder& builder, const DeltaKey& key, ThreadPool& pool);
  Result<RingEntryPtr> merge_chain(const Build& build);
  Result<RingEntryPtr> compact_chain(const Build& build);
  Result<RingEntryPtr> merged_for(const Build& build);
  Result<RingEntryPtr> compact_one(const Build& build, const RingEntry& plain);
  bool read_served(const VersionId& version, std::span<const std::uint64_t> tiles, std::byte* out) const;

  // The trainer-setup thread.
  Result<OpenSegment> open_as(const Generation& generation) const;
  Status release_serving(const std::string& why);
  GenerationPtr newest_generation() const;

  bool is_pending(std::uint64_t epoch) const;
  void wake();
  void notify();

  const CoreOptions options_;
  const std::shared_ptr<shm::AgentLock> lock_;
  Metrics metrics_;
  LeaseTable leases_;
  LeaseTable holds_{[] {}};  ///< one for each plan, on no half
  ThreadPool pool_;          // the publisher's, as the next two
  OverlappedDiff overlapped_diff_;
  PackPool packers_;
  Suspects suspects_;
  const Room copy_room_;
  const Room peer_room_;
  std::uint64_t epoch_published_ = 0;          // the trainer-setup thread's: of the last version when a writer came
  std::atomic<std::uint64_t> epoch_heard_{0};  // the latest that receivers hold, at most kEpochHeardMax
  std::uint64_t spot_cursor_ = 0;              // the tile that spot_check looks at next
  std::shared_ptr<Listeners> listeners_ = std::make_shared<Listeners>();

  // Its own mutex, the last in every order: leases wake the publisher while mutex_ is held.
  std::mutex wake_mutex_;
  std::condition_variable wake_cv_;
  bool woken_ = false;             // protected by wake_mutex_
  GenerationPtr wait_generation_;  // protected by wake_mutex_: the newest, whose bell the publisher hears

  const std::shared_ptr<Reclaimer> reclaimer_ = std::make_shared<Reclaimer>(options_.before_unmap);
  mutable std::mutex mutex_;
  std::vector<GenerationPtr> generations_;  // protected by mutex_, as all below; ascending
  SnapshotPtr snapshot_ = std::make_shared<const Snapshot>();
  DeltaRing ring_;
  RingKeeper keeper_;                                    // its own mutex, the last in every order
  std::vector<std::weak_ptr<const RingEntry>> evicted_;  // may be pinned by plans
  std::map<std::uint64_t, OpenPlanPtr> plans_;
  ServedPackedFrameCache packed_frames_;
  std::map<Digest128, std::weak_ptr<Subset>> subsets_;  // by TileSet::digest()
  DerivedDeltaCache derived_;
  std::uint64_t generation_next_ = 1;
  VersionId found_;  ///< constant after start: the newest that an agent before this one left; epoch 0 if none
  LeaseBudgets budgets_;
  Publications publications_;
  struct HalfRequest {
    HalfKey half;
    std::chrono::steady_clock::time_point since;
    std::chrono::steady_clock::time_point revoke_all_at;
  };
  std::optional<HalfRequest> half_request_;
  std::chrono::steady_clock::time_point names_at_{};  // of the next look at the names of the files
  std::set<std::filesystem::path> nameless_;          // of which it has been said

  std::atomic<bool> stop_{false};
  std::optional<Scrub> scrub_;
  std::thread reclaimer_thread_;  // unmaps and frees what nobody holds any more
  std::thread publisher_;
  /// A thread that makes deltas of one form: a compact one takes so long that no merge could wait for it.
  struct DeltaBuilder {
    explicit DeltaBuilder(DeltaForm made) : form(made) {}
    const DeltaForm form;
    std::optional<DeltaKey> key;      // protected by mutex_: what is being made
    std::atomic<bool> cancel{false};  // it is not wanted any more
    std::thread thread;
  };
  std::condition_variable build_cv_;  // with mutex_: something is wanted, was made or is given up, or stop
  DeltaBuilder merger_{DeltaForm::plain};
  DeltaBuilder compacter_{DeltaForm::compact};
};

}  // namespace deltasync::agent
