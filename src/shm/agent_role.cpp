#include <algorithm>
#include <array>
#include <mutex>

#include "shm/bell.hpp"
#include "shm/cells.hpp"
#include "shm/ensure.hpp"
#include "shm/info.hpp"
#include "shm/roles.hpp"

namespace deltasync::shm {
namespace {

/// The agent's memory policy: it can prove deaths.
class AgentCells : public Cells {
 public:
  using Watches = std::array<std::optional<ProcessWatch>, kSlotsMax>;
  AgentCells(Segment& segment, const Watches& watches) : Cells(segment), watches_(watches) {}
  /// Without a watch nothing is proved: a slot whose owner cannot be watched is treated as alive.
  bool owner_dead(unsigned slot) const { return watches_[slot] && watches_[slot]->dead(); }

 private:
  const Watches& watches_;
};

}  // namespace

struct AgentRole::Impl {
  explicit Impl(Segment& s) : segment(s), cells(s, watches), protocol(cells) {}

  Segment& segment;
  mutable std::mutex mutex;
  AgentCells::Watches watches;                    // protected by mutex, as all below
  std::array<std::uint64_t, kSlotsMax> grants{};  // the number of each slot's last grant
  std::uint64_t granted = 0;                      // the last of all
  AgentCells cells;
  Protocol<AgentCells> protocol;
  std::array<std::optional<std::uint64_t>, kHalves> held;  // the fill that is read while it is written
  std::uint32_t seen = 0;                                  // agent_bell when wait_for_change returned last
  std::array<std::uint64_t, kHalves> seen_states{};

  ControlBlock& block() { return segment.control(); }

  HalfWord state(unsigned half) { return HalfWord::unpack(cells.load(cells.half_state(half))); }

  /// Only for states that this agent alone can end (SEALED and later), or for messages.
  HalfView view(unsigned half) {
    const auto status = inspect_half(segment, half);
    return {half, status.sequence, status.version};
  }

  std::optional<HalfView> find(HalfState wanted) {
    for (unsigned h = 0; h < kHalves; ++h) {
      if (state(h).code == wanted) return view(h);
    }
    return std::nullopt;
  }

  /// Frees what can be freed. True if anything moved.
  bool settle() {
    bool moved = false;
    for (unsigned h = 0; h < kHalves; ++h) {
      const auto before = state(h);
      if (before.code != HalfState::quarantined) continue;
      protocol.settle(h, held[h].value_or(0));
      moved |= state(h) != before;
    }
    if (moved) ring(block().writer_bell);
    return moved;
  }

  void reap_fills() {
    for (unsigned h = 0; h < kHalves; ++h) {
      const auto before = state(h);
      protocol.reap_fill(h);
      if (state(h) != before) {
        ring(block().writer_bell);
        ring(block().agent_bell);
      }
    }
    settle();
  }

  void set_owner(unsigned slot, const ProcessId& id) {
    auto& owner = block().owner[slot];
    Cells::store(&owner.pid, 0);
    Cells::store(&owner.start_ticks, id.start_ticks);
    Cells::store(&owner.pid, static_cast<std::uint64_t>(id.pid));
  }
  /// Tries to watch an owner on record that is not watched yet. False: it is dead.
  bool watch_owner(unsigned slot) {
    const auto pid = Cells::load(&block().owner[slot].pid);
    if (pid == 0 || watches[slot]) return true;
    auto watch = ProcessWatch::open({static_cast<std::int32_t>(pid), Cells::load(&block().owner[slot].start_ticks)});
    if (!watch) return watch.error().code() != Errc::peer_died;
    watches[slot].emplace(std::move(watch).value());
    return true;
  }
  void clear_owner(unsigned slot) {
    Cells::store(&block().owner[slot].pid, 0);
    Cells::store(&block().slot[slot].request_deadline_ns, 0);
    watches[slot].reset();
  }
  bool inside_copy(unsigned slot) {
    return PhaseWord::unpack(cells.load(cells.slot_phase(slot))).code == Phase::copying;
  }
};

AgentRole::AgentRole(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AgentRole::~AgentRole() = default;

Result<std::unique_ptr<AgentRole>> AgentRole::adopt(Segment& segment) {
  auto impl = std::make_unique<Impl>(segment);
  auto& block = segment.control();
  if (impl->state(0).code == HalfState::active && impl->state(1).code == HalfState::active) {
    return Error(Errc::corrupt, "adopt: both halves are ACTIVE");
  }
  for (unsigned k = 0; k < kSlotsMax; ++k) {
    // No owner and dead owner mean the same to the protocol.
    if (!impl->watch_owner(k)) impl->clear_owner(k);
  }
  const auto self = ProcessId::self();
  Cells::store(&block.agent.start_ticks, self.start_ticks);
  Cells::store(&block.agent.pid, static_cast<std::uint64_t>(self.pid));
  for (unsigned h = 0; h < kHalves; ++h) impl->protocol.adopt_half(h);
  impl->reap_fills();
  ring(block.writer_bell);
  return std::unique_ptr<AgentRole>(new AgentRole(std::move(impl)));
}

Result<std::uint64_t> AgentRole::grant_slot(unsigned slot, unsigned writers, ProcessWatch watch) {
  const std::lock_guard lock(impl_->mutex);
  if (writers == 0 || writers > kSlotsMax || slot >= writers) {
    return Error(Errc::invalid_argument, "writer index " + std::to_string(slot) + " of " + std::to_string(writers) +
                                             ": the index is below the number of writers, which is 1 to " +
                                             std::to_string(kSlotsMax));
  }
  auto& block = impl_->block();
  const auto owner_pid = Cells::load(&block.owner[slot].pid);
  if (owner_pid != 0 && !impl_->cells.owner_dead(slot)) {
    const ProcessId owner{static_cast<std::int32_t>(owner_pid), Cells::load(&block.owner[slot].start_ticks)};
    if (owner == watch.id()) {  // it reconnected
      impl_->watches[slot].emplace(std::move(watch));
      return impl_->grants[slot] = ++impl_->granted;
    }
    return Error(Errc::already_exists, "writer slot " + std::to_string(slot) + " is taken by " + to_string(owner));
  }
  // The last owner is gone: end its part in any fill before its words get a new writer.
  impl_->reap_fills();
  impl_->protocol.end_part(slot);
  impl_->clear_owner(slot);
  impl_->settle();
  impl_->set_owner(slot, watch.id());
  impl_->watches[slot].emplace(std::move(watch));
  ring(block.writer_bell);
  return impl_->grants[slot] = ++impl_->granted;
}

void AgentRole::revoke_slot(unsigned slot, std::optional<std::uint64_t> grant) {
  const std::lock_guard lock(impl_->mutex);
  if (slot >= kSlotsMax || Cells::load(&impl_->block().owner[slot].pid) == 0) return;
  if (grant && *grant != impl_->grants[slot]) return;
  const bool dead = impl_->cells.owner_dead(slot);
  impl_->protocol.end_part(slot);
  // A living process that is inside a copy keeps its slot: its name is what quarantine reports.
  if (dead || !impl_->inside_copy(slot)) impl_->clear_owner(slot);
  impl_->settle();
  ring(impl_->block().writer_bell);
}

std::vector<unsigned> AgentRole::reap() {
  const std::lock_guard lock(impl_->mutex);
  std::vector<unsigned> dead;
  for (unsigned k = 0; k < kSlotsMax; ++k) {
    if (!impl_->watch_owner(k) || (impl_->watches[k] && impl_->watches[k]->dead())) dead.push_back(k);
  }
  for (const unsigned k : dead) impl_->clear_owner(k);  // to the protocol the same as a dead owner
  impl_->reap_fills();
  return dead;
}

std::vector<int> AgentRole::watch_fds() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<int> fds;
  for (const auto& watch : impl_->watches) {
    if (watch) fds.push_back(watch->fd());
  }
  return fds;
}

std::optional<HalfView> AgentRole::sealed() const {
  const std::lock_guard lock(impl_->mutex);
  auto half = impl_->protocol.next_sealed();
  while (half == Protocol<AgentCells>::kAgain)
    half = impl_->protocol.next_sealed();  // states move a few times a version
  if (half < 0) return std::nullopt;
  return impl_->view(static_cast<unsigned>(half));
}
std::optional<HalfView> AgentRole::active() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->find(HalfState::active);
}
std::optional<HalfView> AgentRole::retiring() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->find(HalfState::retiring);
}
std::optional<FillView> AgentRole::filling() const {
  const std::lock_guard lock(impl_->mutex);
  for (unsigned h = 0; h < kHalves; ++h) {
    const auto status = inspect_half(impl_->segment, h);
    if (status.state == HalfState::filling && status.version.id.valid()) {
      return FillView{h, status.sequence, status.version, status.writers};
    }
  }
  return std::nullopt;
}

Status AgentRole::activate(const HalfView& sealed) {
  const std::lock_guard lock(impl_->mutex);
  if (sealed.half >= kHalves || impl_->state(sealed.half) != HalfWord{HalfState::sealed, sealed.sequence}) {
    return Error(Errc::internal,
                 "activate " + to_string(sealed.version) + ": " + describe_half(impl_->segment, sealed.half % kHalves));
  }
  if (impl_->find(HalfState::retiring)) {
    return Error(Errc::internal, "activate " + to_string(sealed.version) + ": the version before is still retiring");
  }
  impl_->held[sealed.half].reset();
  if (!impl_->protocol.activate(sealed.half, sealed.sequence)) {
    return Error(Errc::internal, "activate " + to_string(sealed.version) + ": the state moved under the agent's mutex");
  }
  ring(impl_->block().writer_bell);
  return {};
}

void AgentRole::retire_done(const HalfView& retiring) {
  const std::lock_guard lock(impl_->mutex);
  const bool freed = impl_->protocol.free_retired(retiring.half, retiring.sequence);
  ensure(freed, "retire_done follows activate, once");
  ring(impl_->block().writer_bell);
}

std::uint64_t AgentRole::elements_done(const FillView& fill, std::uint64_t batch) const {
  // One word, and nothing of this object: no mutex.
  return batch < impl_->segment.batches() ? impl_->protocol.elements_done(fill.half, batch, fill.sequence) : 0;
}

Status AgentRole::hold(const FillView& fill) {
  const std::lock_guard lock(impl_->mutex);
  impl_->held[fill.half] = fill.sequence;
  // Only this agent makes a quarantined half FREE, under the same mutex: from here on it will not.
  const auto now = impl_->state(fill.half);
  if (now.sequence == fill.sequence && now.code != HalfState::free) return {};
  impl_->held[fill.half].reset();
  return Error(Errc::gone, "the fill of " + to_string(fill.version) + " is over");
}

void AgentRole::unhold(const FillView& fill) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->held[fill.half] == fill.sequence) impl_->held[fill.half].reset();
  impl_->settle();
}

std::optional<Deadline> AgentRole::writer_waiting() const {
  const std::lock_guard lock(impl_->mutex);
  auto& block = impl_->block();
  std::optional<Deadline> earliest;
  for (unsigned k = 0; k < kSlotsMax; ++k) {
    const auto request = Cells::load(&block.slot[k].request_deadline_ns);
    if (request == 0 || Cells::load(&block.owner[k].pid) == 0 || impl_->cells.owner_dead(k)) continue;
    const auto since = std::chrono::nanoseconds(static_cast<std::int64_t>(std::min<std::uint64_t>(request, INT64_MAX)));
    const Deadline deadline(
        std::chrono::steady_clock::time_point(std::chrono::duration_cast<std::chrono::steady_clock::duration>(since)));
    earliest = earliest ? earliest->earlier(deadline) : deadline;
  }
  return earliest;
}

void AgentRole::wait_for_change(Deadline deadline) {
  auto& bell = impl_->block().agent_bell;
  for (;;) {
    const auto count = bell_count(bell);
    {
      const std::lock_guard lock(impl_->mutex);
      bool changed = impl_->settle() || count != impl_->seen;
      for (unsigned h = 0; h < kHalves; ++h) {
        // A writer that died after its change and before its ring is noticed by the change itself.
        const auto word = impl_->cells.load(impl_->cells.half_state(h));
        changed |= std::exchange(impl_->seen_states[h], word) != word;
      }
      impl_->seen = count;
      if (changed) return;
    }
    if (deadline.passed()) return;
    sleep_on(bell, count, deadline);
  }
}

void AgentRole::wake() {
  ring(impl_->block().agent_bell);
}

}  // namespace deltasync::shm
