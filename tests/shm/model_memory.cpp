#include "shm/model_memory.hpp"

#include <algorithm>

#include "shm/model_actors.hpp"

namespace deltasync::shm::model {

const char* name(Violation violation) {
  switch (violation) {
    case Violation::none: return "none";
    case Violation::wrong_write: return "bytes written that are not the writer's to write";
    case Violation::torn: return "a torn version";
    case Violation::torn_info: return "a version read that no fill was of";
    case Violation::two_active: return "two halves ACTIVE";
    case Violation::went_back: return "an older version became ACTIVE";
    case Violation::wrong_edge: return "a forbidden state transition";
    case Violation::wrong_abort: return "a fill aborted by somebody without a part in it";
    case Violation::stale_join: return "begin returned a fill that was over";
    case Violation::spurious_retry: return "a retry though nothing moved";
    case Violation::stuck: return "a stuck party";
    case Violation::log_full: return "an episode longer than the model allows";
  }
  return "?";
}

void Memory::write_data(unsigned half, unsigned cell, std::uint64_t sequence, std::uint32_t value) {
  operation([&] {
    delay({kData + half * kDataCells + cell, value, sequence});
    if (!delays_bytes_) drain();
    return std::uint64_t{0};
  });
}

void Memory::check_data(const Pending& bytes) {
  const auto half = static_cast<unsigned>((bytes.cell - kData) / kDataCells);
  const auto now = half_word(s_, half);
  const bool ours =
      now.sequence == bytes.sequence && (now.code == HalfState::filling || now.code == HalfState::quarantined);
  const bool leased = s_.lease.taken && !s_.lease.revoked && s_.lease.half == half;
  // The agent reads, while they write, what their progress covers.
  const bool read = s_.held[half] != 0 && (s_.held[half] != bytes.sequence || batch_whole(s_, half, bytes.sequence));
  if (!ours || leased || read) report(Violation::wrong_write);
}

std::uint64_t Memory::seen(Cell cell) const {
  const auto& me = s_.actor[me_];
  for (unsigned i = me.pending_size; i-- > 0;) {
    if (me.pending[i].cell == cell) return me.pending[i].value;
  }
  return s_.cells[cell];
}

void Memory::delay(const Pending& stored) {
  auto& me = self();
  if (me.pending_size == kPendingMax) drain_one();
  me.pending[me.pending_size++] = stored;
}

void Memory::drain_one() {
  auto& me = self();
  const Pending oldest = me.pending[0];
  std::move(me.pending.begin() + 1, me.pending.begin() + me.pending_size, me.pending.begin());
  me.pending[--me.pending_size] = {};
  if (oldest.cell >= kData) check_data(oldest);
  s_.cells[oldest.cell] = oldest.value;
}

void Memory::drain() {
  while (self().pending_size != 0) drain_one();
}

std::uint32_t Memory::read_data(unsigned half, unsigned cell, std::uint32_t must_be) {
  return static_cast<std::uint32_t>(operation([&] {
    const auto value = s_.cells[kData + half * kDataCells + cell];
    if (must_be != 0 && value != must_be) report(Violation::torn);
    return value;
  }));
}

void Memory::check_store(Cell cell) {
  const auto& a = s_.actor[me_];
  if (!rules_.check_edges) return;
  const auto is_in = [&](unsigned first, unsigned count) { return cell >= first && cell < first + count; };
  bool good = false;
  if (is_in(kPhase, kSlots)) {
    // One writer per field: the process that the slot is granted to.
    good = a.kind == Kind::writer && s_.cells[kOwner + a.slot] == a.process;
  } else if (is_in(kInfoCells, kHalves * kInfo)) {
    const auto half = (cell - kInfoCells) / kInfo;
    good = a.kind == Kind::writer && a.slot == 0 && half_word(s_, half).code == HalfState::free;
  } else if (is_in(kOwner, kSlots)) {
    good = a.kind == Kind::agent;
  }
  if (!good) report(Violation::wrong_edge);
}

void Memory::check_cas(Cell cell, std::uint64_t from, std::uint64_t to) {
  if (cell < kProgress) return check_edge(cell - kState, HalfWord::unpack(from), HalfWord::unpack(to));
  // Progress is counted by those who fill the half, while they do.
  const auto now = half_word(s_, cell - kProgress);
  const bool ours = s_.actor[me_].kind == Kind::writer && s_.actor[me_].locals.sequence == now.sequence &&
                    (now.code == HalfState::filling || now.code == HalfState::quarantined);
  if (!ours && rules_.check_edges) report(Violation::wrong_edge);
}

bool Memory::may_abort(std::uint64_t sequence) const {
  const auto& a = s_.actor[me_];
  // After an exec the writer knows its part by its phase only.
  if (a.kind == Kind::writer) {
    return a.locals.sequence == sequence || (a.locals.pc == kInit && phase_word(s_, a.slot).sequence == sequence);
  }
  if (a.kind != Kind::agent) return false;
  for (unsigned k = 0; k < kSlots; ++k) {
    const auto owner = s_.cells[kOwner + k];
    if (phase_word(s_, k).sequence == sequence && (owner == 0 || process_dead(owner))) return true;
  }
  return false;
}

void Memory::check_edge(unsigned half, HalfWord from, HalfWord to) {
  const auto& a = s_.actor[me_];
  const bool by_agent = a.kind == Kind::agent;
  const bool same = from.sequence == to.sequence;
  const auto is = [&](HalfState x, HalfState y) { return from.code == x && to.code == y; };
  bool good = false;
  if (is(HalfState::free, HalfState::filling)) {
    good = a.kind == Kind::writer && a.slot == 0 && to.sequence > half_word(s_, 0).sequence &&
           to.sequence > half_word(s_, 1).sequence;
  } else if (is(HalfState::filling, HalfState::sealed)) {
    good = same;
  } else if (is(HalfState::filling, HalfState::quarantined)) {
    good = same;
  } else if (is(HalfState::quarantined, HalfState::free) || is(HalfState::sealed, HalfState::active) ||
             is(HalfState::active, HalfState::retiring) || is(HalfState::retiring, HalfState::free)) {
    good = same && by_agent;
  }
  if (!good && rules_.check_edges) report(Violation::wrong_edge);
  if (to.code == HalfState::filling) s_.fill_value[half] = claiming_;
  if (from.code == HalfState::filling && (to.code == HalfState::quarantined || to.code == HalfState::free) &&
      !may_abort(from.sequence)) {
    report(Violation::wrong_abort);
  }
  if (to.code == HalfState::active) {
    const std::uint32_t value = info_value(s_, half);
    const bool repeated = epoch_of(value) == epoch_of(s_.last_active) && value <= s_.last_active;
    if (repeated || to.sequence <= s_.last_sequence) report(Violation::went_back);
    s_.last_active = value;
    s_.last_sequence = static_cast<std::uint32_t>(to.sequence);
  }
}

}  // namespace deltasync::shm::model
