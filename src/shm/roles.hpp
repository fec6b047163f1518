// What a writer process and what the agent may do with a segment: the half protocol bound to a mapped segment,
// real time and real processes. The transitions themselves are in shm/protocol.hpp, written once over a memory
// policy, so that the exhaustive explorer in tests/shm runs the very same code.
//
// A half goes FREE → FILLING → SEALED → ACTIVE → RETIRING → FREE, or FILLING → QUARANTINED → FREE.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "base/fork_guard.hpp"
#include "base/process.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

/// One open fill of one half, as its writer knows it.
struct Fill {
  unsigned half = 0;
  std::uint64_t sequence = 0;  ///< grows with every fill of the segment; tells a fill from a later one
};

/// The writer's view. One per process and slot; used by one thread, except the copy brackets, which any thread may
/// open.
class WriterRole {
 public:
  /// `slot` was granted by the agent (Unix socket) and stays granted while the role lives; the segment outlives it.
  /// Ends what an earlier program in this process left open in the slot (exec keeps the process, and so the slot).
  WriterRole(Segment& segment, unsigned slot, unsigned writers);
  /// Aborts an open fill, unless this is a forked child's copy.
  ~WriterRole();
  WriterRole(const WriterRole&) = delete;
  WriterRole& operator=(const WriterRole&) = delete;

  /// Slot 0 claims a FREE half; others join the fill of the same {version, writers}. See Writer::begin for errors.
  /// While slot 0 waits it publishes its request and the deadline, so that the agent can revoke leases in time.
  Result<Fill> begin(const Version& version, const CallContext& until);
  /// Brackets a copy into the half: between enter and leave the half cannot become FREE. enter fails with aborted if
  /// the fill is over. Nothing may be written outside of the brackets. Any thread; brackets may overlap.
  /// Non-temporal stores need a store fence on their own thread before leave_copy.
  Status enter_copy(const Fill& fill);
  void leave_copy(const Fill& fill);
  /// So many more elements of a batch are in place: the agent may read a batch once all of it is. Inside a copy
  /// bracket, after the copies (and their fences); any thread.
  void add_progress(const Fill& fill, std::uint64_t batch, std::uint64_t elements);
  /// Marks this writer committed, seals if it is the last, else waits for the others until the end, then aborts.
  /// Errors: aborted, timed_out and cancelled (name the writers that were missing), invalid_argument (a copy is still
  /// open).
  Status commit(const Fill& fill, const CallContext& until);
  void abort(const Fill& fill) noexcept;
  /// Newest committed version (sealed, active or retiring); invalid if none.
  VersionId newest() const;

 private:
  void set_request(std::uint64_t deadline_ns) noexcept;
  void close_fill() noexcept;
  Error begin_timed_out(const Version& version) const;
  Error commit_timed_out(const Fill& fill) const;

  const ForkGuard fork_guard_;
  Segment& segment_;
  const unsigned slot_;
  const unsigned writers_;
  std::optional<Fill> open_;  // session thread only
  std::mutex copy_mutex_;     // orders the phase stores of overlapping brackets
  unsigned copies_ = 0;       // open brackets; protected by copy_mutex_
};

/// A sealed or served half, as the agent sees it.
struct HalfView {
  unsigned half = 0;
  std::uint64_t sequence = 0;
  Version version;
};
/// A half that is being filled.
struct FillView {
  unsigned half = 0;
  std::uint64_t sequence = 0;
  Version version;
  unsigned writers = 0;
};

/// Whether the half still has the content of this fill, sealed and not yet given back to the writers. Who has read its
/// bytes before, and asks afterwards, knows that they were of it. Any thread of any process.
bool still_holds(Segment& segment, unsigned half, std::uint64_t sequence);

/// The agent's view. One per segment generation. All calls may come from any thread; a mutex orders them.
class AgentRole {
 public:
  /// Takes over whatever a dead agent left (the caller holds the AgentLock): RETIRING halves become FREE, fills of
  /// dead writers are quarantined and freed, an ACTIVE half stays ACTIVE, and a SEALED one waits to be activated as
  /// usual (also when nothing is ACTIVE). corrupt: two halves claim to be ACTIVE.
  static Result<std::unique_ptr<AgentRole>> adopt(Segment& segment);
  ~AgentRole();

  /// A slot for a connected writer process. `watch` proves its death later. Returns the grant's number, which no other
  /// grant of this role has. already_exists names the live owner; the same process may ask again (it reconnected) and
  /// keeps its open fill.
  Result<std::uint64_t> grant_slot(unsigned slot, unsigned writers, ProcessWatch watch);
  /// The writer said goodbye or its connection closed *and* its process is proved dead. A living owner that is inside
  /// a copy keeps the slot until it is dead or out. With `grant`: nothing if the slot was granted again since, be it to
  /// the same process.
  void revoke_slot(unsigned slot, std::optional<std::uint64_t> grant = std::nullopt);
  /// Looks at all watched writers; quarantines fills of the dead, frees quarantined halves whose writers are all
  /// dead or out of their copies. Call on a pidfd event and now and then. Returns the slots found dead.
  std::vector<unsigned> reap();
  /// pidfds to poll.
  std::vector<int> watch_fds() const;

  /// A half in SEALED, if any: of two the older.
  std::optional<HalfView> sealed() const;
  /// The half in ACTIVE, if any.
  std::optional<HalfView> active() const;
  /// The half in RETIRING, if any.
  std::optional<HalfView> retiring() const;
  /// The half in FILLING, if any.
  std::optional<FillView> filling() const;
  /// SEALED → ACTIVE; the half that was ACTIVE becomes RETIRING. Both may be read until retire_done.
  Status activate(const HalfView& sealed);
  /// RETIRING → FREE. The caller has ended the diff and every lease on it (asserted by the caller's lease table).
  void retire_done(const HalfView& retiring);

  /// Elements of a batch that the fill's writers have put in place. A batch that is whole may be read while the half is
  /// held.
  std::uint64_t elements_done(const FillView& fill, std::uint64_t batch) const;
  /// Reading while writers write: after hold() the half does not become FREE by an abort until unhold(), though it may
  /// be aborted already (QUARANTINED). gone if the fill is over.
  Status hold(const FillView& fill);
  void unhold(const FillView& fill);

  /// A writer waits for a free half: when its deadline passes (steady clock), or nothing.
  std::optional<Deadline> writer_waiting() const;
  /// Blocks until something in the segment changed (a seal, an abort, a request) or the deadline. Changes since the
  /// last return count, so that nothing is missed between looking and waiting. One thread at a time.
  void wait_for_change(Deadline deadline);
  /// Wakes wait_for_change.
  void wake();

 private:
  struct Impl;
  explicit AgentRole(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// ---- for people and tools: a look that changes nothing -------------------------------------------------------

struct HalfStatus {
  HalfState state = HalfState::free;
  std::uint64_t sequence = 0;
  Version version;  ///< invalid in FREE and QUARANTINED
  unsigned writers = 0;
};
HalfStatus inspect_half(Segment& segment, unsigned half);
/// The version that was committed last; invalid if none.
Version inspect_newest(Segment& segment);

struct SlotStatus {
  std::int32_t pid = 0;  ///< 0: not granted
  Phase phase = Phase::idle;
  std::uint64_t sequence = 0;  ///< of the fill that the phase speaks of
  bool waiting = false;        ///< for a FREE half
};
SlotStatus inspect_slot(Segment& segment, unsigned slot);

/// Elements that are in place in a fill, over all of the half.
std::uint64_t inspect_progress(Segment& segment, unsigned half, std::uint64_t sequence);

/// The agent that adopted the segment last; pid 0 if none did yet.
ProcessId inspect_agent(Segment& segment);

/// "half 1 is RETIRING (e18c…:12)", and for QUARANTINED who is inside a copy.
std::string describe_half(Segment& segment, unsigned half);

}  // namespace deltasync::shm
