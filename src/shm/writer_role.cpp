#include "base/label.hpp"
#include "shm/bell.hpp"
#include "shm/cells.hpp"
#include "shm/ensure.hpp"
#include "shm/info.hpp"
#include "shm/roles.hpp"

namespace deltasync::shm {
namespace {

std::uint64_t to_ns(Deadline deadline) {
  const auto since = deadline.at().time_since_epoch();
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  return ns > 0 ? static_cast<std::uint64_t>(ns) : 1;
}

/// What ended a wait: the deadline, whose error names what was waited for, or the caller's stop.
Error ended(const CallContext& until, Error timed_out) {
  if (!until.stop_requested()) return timed_out;
  return {Errc::cancelled, "stopped while it waited; " + timed_out.message()};
}

/// Whether the leader of an open fill is a living process. Seen from a writer this is a hint for the message only.
bool leader_alive(Segment& segment) {
  const auto& owner = segment.control().owner[0];
  const auto pid = Cells::load(const_cast<std::uint64_t*>(&owner.pid));
  if (pid == 0) return false;
  return !proved_dead({static_cast<std::int32_t>(pid), Cells::load(const_cast<std::uint64_t*>(&owner.start_ticks))});
}

Error conflict(const Version& want, unsigned writers, const BeginResult& found) {
  const auto other = to_version(found.other);
  std::string text = "begin " + to_string(want) + ": ";
  if (!found.other_open) {
    text += to_string(other) + " is committed already, and the numbers of an epoch grow";
  } else if (other.id.epoch != want.id.epoch) {
    text += "writer 0 is filling " + to_string(other) + ", which is of another epoch";
  } else if (other.id != want.id) {
    text += "writer 0 is filling " + to_string(other);
  } else {
    text += "writer 0 fills it with " + std::to_string(found.other[kInfoWriters]) + " writers, this one says " +
            std::to_string(writers);
  }
  return {Errc::version_conflict, std::move(text)};
}

}  // namespace

WriterRole::WriterRole(Segment& segment, unsigned slot, unsigned writers)
    : segment_(segment), slot_(slot), writers_(writers) {
  ensure(slot < writers && writers <= kSlotsMax, "a slot is below the number of writers");
  Cells cells(segment);
  set_request(0);
  Protocol<Cells>(cells).start_slot(slot_);
  ring(segment_.control().writer_bell);
  ring(segment_.control().agent_bell);
}

WriterRole::~WriterRole() {
  if (open_ && fork_guard_.same_process()) abort(*open_);
}

void WriterRole::set_request(std::uint64_t deadline_ns) noexcept {
  Cells::store(&segment_.control().slot[slot_].request_deadline_ns, deadline_ns);
}

Result<Fill> WriterRole::begin(const Version& version, const CallContext& until) {
  if (open_) return Error(Errc::invalid_argument, "begin " + to_string(version) + ": a fill is open already");
  if (!version.id.valid()) return Error(Errc::invalid_argument, "begin: epoch 0 means \"no version\"");
  DS_TRY(check_label(version.label).with_context("begin"));
  {
    // The phase word can announce one fill's copies only; begin() below overwrites it.
    const std::lock_guard lock(copy_mutex_);
    if (copies_ > 0) return Error(Errc::invalid_argument, "begin: a copy of the fill before is still running");
  }
  auto& block = segment_.control();
  Cells cells(segment_);
  if (cells.load(cells.slot_owner(slot_)) == 0) {
    return Error(Errc::invalid_argument, "begin: writer slot " + std::to_string(slot_) + " is not granted");
  }
  Protocol<Cells> protocol(cells);
  const auto want = to_words(version, writers_);
  bool requested = false;
  for (;;) {
    const auto seen = bell_count(block.writer_bell);  // before the look, so that a change after it wakes us
    const auto found = slot_ == 0 ? protocol.lead(want) : protocol.join(slot_, want);
    const bool out_of_time = until.over();
    if (found.attempt == Attempt::done) {
      if (requested) set_request(0);
      open_ = Fill{found.half, found.sequence};
      ring(block.writer_bell);
      ring(block.agent_bell);
      return *open_;
    }
    if (found.attempt == Attempt::conflict) {
      // An open fill may be what a slower leader, or a dead one of any epoch, left: that ends by itself.
      const VersionId other = version_of(found.other);
      const bool slower = other.epoch == version.id.epoch && other.number < version.id.number;
      const bool left = other.epoch != version.id.epoch && !leader_alive(segment_);
      const bool may_pass = found.other_open && (slower || left);
      if (!may_pass || out_of_time) {
        if (requested) set_request(0);
        auto error = conflict(version, writers_, found);
        return may_pass ? ended(until, Error(Errc::timed_out, error.message())) : error;
      }
    }
    if (out_of_time) {
      if (requested) set_request(0);
      return ended(until, begin_timed_out(version));
    }
    if (found.attempt == Attempt::again) continue;
    if (slot_ == 0 && !requested) {
      requested = true;
      set_request(to_ns(until.deadline()));
      ring(block.agent_bell);
    }
    sleep_on(block.writer_bell, seen, until.deadline());
  }
}

Error WriterRole::begin_timed_out(const Version& version) const {
  auto text = "begin " + to_string(version) + ": ";
  auto code = Errc::timed_out;
  if (slot_ == 0) {
    text += "no free half: ";
    for (unsigned h = 0; h < kHalves; ++h) {
      text += describe_half(segment_, h) + (h == 0 ? "; " : "");
      const auto half = inspect_half(segment_, h);
      for (unsigned k = 0; k < kSlotsMax && half.state == HalfState::quarantined; ++k) {
        const auto slot = inspect_slot(segment_, k);
        if (slot.phase == Phase::copying && slot.sequence == half.sequence) code = Errc::quarantined;
      }
    }
    const auto agent = inspect_agent(segment_);
    if (agent.pid == 0 || proved_dead(agent)) {
      text += agent.pid == 0 ? "; no agent serves this segment" : "; its agent (" + to_string(agent) + ") is dead";
      text += ": start it again";
    }
  } else {
    text += "writer 0 has not begun it";
  }
  return {code, std::move(text)};
}

Status WriterRole::enter_copy(const Fill& fill) {
  const std::lock_guard lock(copy_mutex_);
  Cells cells(segment_);
  Protocol<Cells> protocol(cells);
  // The first bracket announces the copy for all that overlap it; every one looks whether the fill still lives.
  const bool alive = copies_ == 0 ? protocol.enter_copy(slot_, fill.half, fill.sequence)
                                  : protocol.fill_state(fill.half, fill.sequence) == FillState::open;
  if (!alive) {
    ring(segment_.control().agent_bell);  // COPYING stood for a moment: the agent may have seen it and be waiting
    return Error(Errc::aborted,
                 "the fill of half " + std::to_string(fill.half) + " was aborted by another writer or after a death");
  }
  ++copies_;
  return {};
}

void WriterRole::leave_copy(const Fill& fill) {
  const std::lock_guard lock(copy_mutex_);
  ensure(copies_ > 0, "leave_copy follows enter_copy");
  if (--copies_ > 0) return;
  Cells cells(segment_);
  Protocol<Cells> protocol(cells);
  protocol.leave_copy(slot_, fill.sequence);
  // Only an ended fill has somebody waiting for this.
  if (protocol.fill_state(fill.half, fill.sequence) != FillState::open) ring(segment_.control().agent_bell);
}

void WriterRole::add_progress(const Fill& fill, std::uint64_t batch, std::uint64_t elements) {
  ensure(batch < segment_.batches(), "progress is of a batch of the layout");
  Cells cells(segment_);
  Protocol<Cells> protocol(cells);
  while (!protocol.add_progress(fill.half, batch, fill.sequence, elements)) continue;  // ends: somebody else got on
}

Status WriterRole::commit(const Fill& fill, const CallContext& until) {
  auto& block = segment_.control();
  Cells cells(segment_);
  Protocol<Cells> protocol(cells);
  {
    const std::lock_guard lock(copy_mutex_);
    if (copies_ > 0) return Error(Errc::invalid_argument, "commit: a copy is still running");
    protocol.mark_committed(slot_, fill.sequence);
  }
  ring(block.writer_bell);  // another writer may be waiting for this COMMITTED
  for (;;) {
    const auto seen = bell_count(block.writer_bell);
    protocol.try_seal(fill.half, fill.sequence);
    const auto state = protocol.fill_state(fill.half, fill.sequence);
    if (state == FillState::sealed) {
      close_fill();
      return {};
    }
    if (state != FillState::open) {
      close_fill();
      return Error(Errc::aborted, "commit: the fill was aborted by another writer or after a death");
    }
    if (until.over()) {
      auto error = ended(until, commit_timed_out(fill));
      // One last chance: between the look and this abort the last writer may have sealed.
      if (protocol.abort(fill.half, fill.sequence)) {
        close_fill();
        return error;
      }
      continue;
    }
    sleep_on(block.writer_bell, seen, until.deadline());
  }
}

Error WriterRole::commit_timed_out(const Fill& fill) const {
  std::string text = "commit: waited for";
  for (unsigned k = 0; k < writers_; ++k) {
    const auto slot = inspect_slot(segment_, k);
    if (slot.sequence == fill.sequence && slot.phase == Phase::committed) continue;
    text += " writer " + std::to_string(k);
    text += slot.pid == 0 ? " (no process)," : " (pid " + std::to_string(slot.pid) + "),";
  }
  text.pop_back();
  return {Errc::timed_out, std::move(text)};
}

void WriterRole::abort(const Fill& fill) noexcept {
  Cells cells(segment_);
  Protocol<Cells>(cells).abort(fill.half, fill.sequence);
  close_fill();
}

void WriterRole::close_fill() noexcept {
  open_.reset();
  auto& block = segment_.control();
  {
    const std::lock_guard lock(copy_mutex_);
    Cells cells(segment_);
    // A copy thread that is still inside keeps COPYING up; its leave_copy ends that.
    if (copies_ == 0) Protocol<Cells>(cells).mark_idle(slot_);
  }
  ring(block.writer_bell);
  ring(block.agent_bell);
}

VersionId WriterRole::newest() const {
  Cells cells(segment_);
  Protocol<Cells> protocol(cells);
  for (;;) {
    // Ends soon: a state word moves a few times per version.
    if (const auto snapshot = protocol.snapshot(); snapshot.stable) return snapshot.newest();
  }
}

}  // namespace deltasync::shm
