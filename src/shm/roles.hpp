// What a writer process and what the agent may do with a segment: the half protocol bound to a mapped segment,
// real time and real processes. The transitions themselves are in shm/protocol.hpp, written once over a memory
// policy, so that the exhaustive explorer in tests/shm runs the very same code.
//
// A half goes FREE → FILLING → SEALED → ACTIVE → RETIRING → FREE, or FILLING → QUARANTINED → FREE.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/process.hpp"
#include "deltasync/deadline.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

/// One open fill of one half, as its writer knows it.
struct Fill {
  unsigned half = 0;
  std::uint64_t sequence = 0;  ///< grows with every fill of the segment; tells a fill from a later one
};

/// The writer's view. One per process and slot; used by one thread, except copying() from copy threads.
class WriterRole {
 public:
  /// `slot` was granted by the agent (Unix socket); the segment outlives the role.
  WriterRole(Segment& segment, unsigned slot, unsigned writers);
  ~WriterRole();

  /// Slot 0 claims a FREE half; others join the fill of the same {version, writers}. See Writer::begin for errors.
  /// `guard_s` is what the wait took. While it waits it publishes its wish and deadline, so that the agent can revoke
  /// leases in time.
  Result<Fill> begin(const Version& version, Deadline deadline);
  /// Brackets a copy into the half: between enter and leave the half cannot become FREE. enter fails with aborted if
  /// the fill is over. Nothing may be written outside of the brackets.
  Status enter_copy(const Fill& fill);
  void leave_copy(const Fill& fill);
  /// Rectangles of the plan done so far, in plan order: the agent may read what they cover.
  void publish_progress(const Fill& fill, std::uint64_t rectangles);
  /// Marks this writer committed, seals if it is the last, else waits for the others until the deadline, then aborts.
  Status commit(const Fill& fill, Deadline deadline);
  void abort(const Fill& fill) noexcept;
  /// Newest sealed or active version; invalid if none.
  VersionId newest() const;

 private:
  Segment& segment_;
  unsigned slot_;
  unsigned writers_;
};

/// A sealed or served half, as the agent sees it.
struct HalfView {
  unsigned half = 0;
  std::uint64_t sequence = 0;
  Version version;
};

/// The agent's view. One per segment generation; used by one thread (the publisher), except where noted.
class AgentRole {
 public:
  /// Takes over whatever a dead agent left (after AgentLock): RETIRING halves become FREE, the newest sealed or active
  /// version becomes ACTIVE, dead writers' fills are quarantined and freed.
  static Result<std::unique_ptr<AgentRole>> adopt(Segment& segment);
  ~AgentRole();

  /// A slot for a connected writer process. `watch` proves its death later. already_exists names the live owner.
  Status grant_slot(unsigned slot, unsigned writers, ProcessWatch watch);
  /// The writer said goodbye or its connection closed *and* its process is proved dead.
  void revoke_slot(unsigned slot);
  /// Looks at all watched writers; quarantines fills of the dead, frees quarantined halves whose writers are all
  /// dead or out of their copies. Call on a pidfd event and now and then. Returns the slots found dead.
  std::vector<unsigned> reap();
  /// pidfds to poll.
  std::vector<int> watch_fds() const;

  /// A half in SEALED, if any.
  std::optional<HalfView> sealed() const;
  /// The half in ACTIVE, if any.
  std::optional<HalfView> active() const;
  /// The half in RETIRING, if any.
  std::optional<HalfView> retiring() const;
  /// SEALED → ACTIVE; the half that was ACTIVE becomes RETIRING. Both may be read until retire_done.
  Status activate(const HalfView& sealed);
  /// RETIRING → FREE. The caller has ended the diff and every lease on it (asserted by the caller's lease table).
  void retire_done(const HalfView& retiring);

  /// A writer waits for a free half: when its deadline passes (steady clock), or nothing. Any thread.
  std::optional<Deadline> writer_waiting() const;
  /// Blocks until something in the segment changed (a seal, an abort, a wish) or the deadline. Any one thread.
  void wait_for_change(Deadline deadline);
  /// Wakes wait_for_change. Any thread.
  void wake();

 private:
  struct Impl;
  explicit AgentRole(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltasync::shm
