// The half protocol: every transition of a half and every guard in front of it, written once over a memory policy.
// shm/cells.hpp binds it to a mapped segment; tests/shm/explorer.hpp runs the same code on simulated memory and
// tries every interleaving. shm_protocol.md has the state machine, the sync points and the crash matrix.
//
//   FREE ──lead──▶ FILLING ──seal──▶ SEALED ──activate──▶ ACTIVE ──retire──▶ RETIRING ──free──▶ FREE
//                     └──abort──▶ QUARANTINED ──settle──▶ FREE
//
// Each function is one attempt: a bounded number of memory operations and no wait. Waiting belongs to the caller,
// which has a deadline.
//
// Invariants, in terms of the words in format/segment.hpp:
//  P1  The bytes of half h are written only inside a copy bracket of fill s, and state[h] is FILLING(s) or
//      QUARANTINED(s) for as long as any bracket of fill s is open.
//  P2  info[h] is written only by slot 0 and only while state[h] is FREE.
//  P3  SEALED(s) follows only after all writers of fill s stored COMMITTED(s), and a writer stores that only when its
//      copies have ended.
//  P4  At most one half is ACTIVE, and versions become ACTIVE in the order of their claims; the numbers of an epoch
//  grow.
//      Epochs are names: another trainer's may be larger or smaller.
//  P5  A word (code, sequence) of a state never comes back.
//
// Memory policy M:
//   Cell                           names one 64-bit word
//   half_state(h) half_info(h, w)  cells; info_words() of the latter
//   slot_phase(k) slot_owner(k)    cells; slots() of them
//   progress(h, b)                 cell of a batch of a half
//   load(c) store(c, v) cas(c, expected, desired) → bool      sequentially consistent
//   owner_dead(k)                  proof that the owner of slot k is dead (agent only)
//   broken(Guard)                  constant false, except where a test removes one guard to see the explorer notice
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "deltasync/version.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

/// The guards that tests remove one by one.
enum class Guard : std::uint8_t {
  none,
  enter_recheck,         ///< enter_copy looks at the state again after it announced the copy
  settle_copying,        ///< a quarantined half is freed only when nobody is inside a copy
  settle_proof,          ///< … except those *proved* dead
  settle_held,           ///< … and not while the agent reads what writers write
  abort_quarantines,     ///< an abort goes through QUARANTINED, never straight to FREE
  abort_names_fill,      ///< an abort ends only the fill that it names
  seal_all,              ///< a seal needs every writer's COMMITTED
  snapshot_recheck,      ///< info counts only if the state did not change while it was read
  join_recheck,          ///< a joiner looks at the state again after it announced itself
  info_before_claim,     ///< the leader writes the info before it publishes FILLING
  version_grows,         ///< a leader never goes back within its epoch
  claim_free_only,       ///< only a FREE half is claimed
  activate_sealed,       ///< only a SEALED half is activated
  retire_before_active,  ///< the old half leaves ACTIVE before the new one enters
  sealed_recheck,        ///< the choice between sealed halves is made on one moment's states
  sealed_in_order,       ///< of two sealed halves the older is activated first
  progress_restarts,     ///< each fill counts its progress from 0
  progress_names_fill,   ///< a count of another fill says nothing about this one
  reap_dead,             ///< a dead writer's fill is aborted
  grant_ends_fill,       ///< a slot's new owner never inherits the old owner's part in an open fill
  start_ends_fill,       ///< nor does a new program in the owner's own process
  adopt_frees,           ///< a restarted agent frees what its predecessor was retiring
  retire_waits,          ///< the agent frees a retiring half only after its readers (in the agent's lease table)
  grant_dead_only,       ///< a slot is granted again only when its owner is proved dead
  read_recheck,          ///< who read without holding looks at the state again afterwards
  // What shm/cells.hpp and the fences around it give; see memory_order.md.
  read_before_recheck,   ///< … and what it read before is read before that look
  bytes_before_count,    ///< bytes are in place before they are counted
  bytes_before_words,    ///< … and before any word that their writer stores afterwards
  words_in_total_order,  ///< all see a word before its writer loads another
};

/// The version that a half holds, as the words of format/segment.hpp.
using InfoWords = std::array<std::uint64_t, kInfoWords>;
constexpr VersionId version_of(const InfoWords& info) noexcept {
  return {info[kInfoEpoch], info[kInfoNumber]};
}

/// Whether a version that is committed rules out that one may be. Which of two epochs is the later is not to be seen.
constexpr bool rules_out(const VersionId& committed, const VersionId& wanted) noexcept {
  return committed.epoch == wanted.epoch && committed.number >= wanted.number;
}

constexpr bool holds_version(HalfState state) noexcept {
  return state == HalfState::sealed || state == HalfState::active || state == HalfState::retiring;
}

/// Both halves at one moment.
struct Snapshot {
  bool stable = false;  ///< false: something moved meanwhile; take it again
  HalfWord half[kHalves];
  InfoWords info[kHalves] = {};

  /// The version that was committed last; invalid if none.
  VersionId newest() const noexcept {
    VersionId newest;
    std::uint64_t sequence = 0;
    for (unsigned h = 0; h < kHalves; ++h) {
      if (!holds_version(half[h].code) || half[h].sequence < sequence) continue;
      newest = version_of(info[h]);
      sequence = half[h].sequence;
    }
    return newest;
  }
};

enum class Attempt : std::uint8_t {
  done,      ///< `half` and `sequence` say what was taken
  again,     ///< something moved meanwhile; try again at once
  wait,      ///< not now; look again when a bell rings
  conflict,  ///< never: `other` is in the way
};
struct BeginResult {
  Attempt attempt = Attempt::wait;
  unsigned half = 0;
  std::uint64_t sequence = 0;
  InfoWords other{};        ///< conflict: the version that is in the way
  bool other_open = false;  ///< conflict: it is being filled (else it is committed)
};

enum class FillState : std::uint8_t { open, sealed, aborted, moved_on };

template <class M>
class Protocol {
 public:
  explicit Protocol(M& memory) : m_(memory) {}

  Snapshot snapshot() {
    Snapshot s;
    std::uint64_t before[kHalves];
    for (unsigned h = 0; h < kHalves; ++h) {
      before[h] = m_.load(m_.half_state(h));
      s.half[h] = HalfWord::unpack(before[h]);
    }
    for (unsigned h = 0; h < kHalves; ++h) {
      if (s.half[h].code == HalfState::filling || holds_version(s.half[h].code)) load_info(h, s.info[h]);
    }
    s.stable = true;
    if (m_.broken(Guard::snapshot_recheck)) return s;
    // The info of a half is rewritten only while it is FREE, on the way to another sequence: an unchanged word on
    // both sides proves that what was read between belongs to it (and both halves together to one moment).
    for (unsigned h = 0; h < kHalves; ++h) s.stable &= m_.load(m_.half_state(h)) == before[h];
    return s;
  }

  // ---- writers ----------------------------------------------------------------------------------------------

  /// First of all: the slot was granted to this process. An earlier program of the same process (it called exec) may
  /// have left a part in an open fill; no death will end that, and the phase is the last trace of it.
  void start_slot(unsigned slot) {
    if (!m_.broken(Guard::start_ends_fill)) end_part(slot);
    mark_idle(slot);
  }

  /// Slot 0: claims a FREE half for a version that must follow what is committed of its epoch.
  BeginResult lead(const InfoWords& want) {
    const auto s = snapshot();
    if (!s.stable) return {Attempt::again, 0, 0, {}, false};
    for (unsigned h = 0; h < kHalves; ++h) {
      const bool in_the_way = holds_version(s.half[h].code) && rules_out(version_of(s.info[h]), version_of(want));
      if (in_the_way && !m_.broken(Guard::version_grows)) return {Attempt::conflict, h, 0, s.info[h], false};
    }
    for (unsigned h = 0; h < kHalves; ++h) {
      const bool claimable = s.half[h].code == HalfState::free ||
                             (m_.broken(Guard::claim_free_only) && s.half[h].code == HalfState::retiring);
      if (!claimable) continue;
      const auto sequence = std::max(s.half[0].sequence, s.half[1].sequence) + 1;
      const bool claim_first = m_.broken(Guard::info_before_claim);
      if (!claim_first) store_info(h, want);
      // Announced before the claim, so that who sees FILLING sees who leads it.
      m_.store(m_.slot_phase(0), PhaseWord{Phase::joined, sequence}.pack());
      // SYNC POINT claim (release): the info is in place before FILLING can be seen; joiners: claim (acquire).
      if (!m_.cas(m_.half_state(h), s.half[h].pack(), HalfWord{HalfState::filling, sequence}.pack())) {
        return {Attempt::again, 0, 0, {}, false};
      }
      if (claim_first) store_info(h, want);
      return {Attempt::done, h, sequence, {}, false};
    }
    return {Attempt::wait, 0, 0, {}, false};
  }

  /// Other slots: joins the open fill of the same version and number of writers.
  BeginResult join(unsigned slot, const InfoWords& want) {
    const auto s = snapshot();  // SYNC POINT claim (acquire)
    if (!s.stable) return {Attempt::again, 0, 0, {}, false};
    for (unsigned h = 0; h < kHalves; ++h) {
      if (holds_version(s.half[h].code) && rules_out(version_of(s.info[h]), version_of(want))) {
        return {Attempt::conflict, h, 0, s.info[h], false};
      }
    }
    for (unsigned h = 0; h < kHalves; ++h) {
      if (s.half[h].code != HalfState::filling) continue;
      const auto& open = s.info[h];
      if (version_of(open) != version_of(want) || open[kInfoWriters] != want[kInfoWriters]) {
        return {Attempt::conflict, h, s.half[h].sequence, open, true};
      }
      m_.store(m_.slot_phase(slot), PhaseWord{Phase::joined, s.half[h].sequence}.pack());
      if (!m_.broken(Guard::join_recheck) && m_.load(m_.half_state(h)) != s.half[h].pack()) {
        return {Attempt::again, 0, 0, {}, false};
      }
      return {Attempt::done, h, s.half[h].sequence, {}, false};
    }
    return {Attempt::wait, 0, 0, {}, false};
  }

  /// Opens a copy bracket. False: the fill is over, nothing may be written (and the bracket is closed again).
  /// SYNC POINT given back: no byte is written before this load (acquire) has found FILLING, so who sees one of these
  /// bytes, and then looks (still_holds), sees no earlier state.
  bool enter_copy(unsigned slot, unsigned half, std::uint64_t sequence) {
    // SYNC POINT copy (store, then load; settle loads in the other order): either this load sees that the fill is
    // over, or settle sees COPYING. Weaker than sequentially consistent, both could read the old word, and the
    // half would be filled again under this copy.
    m_.store(m_.slot_phase(slot), PhaseWord{Phase::copying, sequence}.pack());
    if (m_.broken(Guard::enter_recheck)) return true;
    if (m_.load(m_.half_state(half)) == HalfWord{HalfState::filling, sequence}.pack()) return true;
    leave_copy(slot, sequence);
    return false;
  }
  /// Closes it. SYNC POINT copied (release): all bytes of the copy are in place before COPYING goes away.
  void leave_copy(unsigned slot, std::uint64_t sequence) {
    m_.store(m_.slot_phase(slot), PhaseWord{Phase::joined, sequence}.pack());
  }

  /// `elements` more of a batch are in place and are not written again in this fill.
  /// SYNC POINT progress (release): their bytes come before it; elements_done (acquire).
  /// Inside a copy bracket, so that the half is not filled again under it. False: another writer added at the same
  /// moment; try again.
  bool add_progress(unsigned half, std::uint64_t batch, std::uint64_t sequence, std::uint64_t elements) {
    const auto cell = m_.progress(half, batch);
    const std::uint64_t before = m_.load(cell);
    auto word = ProgressWord::unpack(before);
    // A count of an earlier fill is not added to: this fill begins at 0.
    if (word.sequence != ProgressWord::tag(sequence) && !m_.broken(Guard::progress_restarts)) word.elements = 0;
    word.sequence = sequence;
    word.elements += elements;
    return m_.cas(cell, before, word.pack());
  }

  /// This writer has written everything; its copies have ended.
  void mark_committed(unsigned slot, std::uint64_t sequence) {
    // SYNC POINT seal (release): every byte of this writer is in place; seal: seal (acquire).
    m_.store(m_.slot_phase(slot), PhaseWord{Phase::committed, sequence}.pack());
  }
  /// Seals the fill if all its writers committed. Anyone may call it, any number of times.
  void try_seal(unsigned half, std::uint64_t sequence) {
    const auto filling = HalfWord{HalfState::filling, sequence}.pack();
    const auto writers = m_.load(m_.half_info(half, kInfoWriters));
    // The count belongs to this fill only if the state still says so after it was read.
    if (m_.load(m_.half_state(half)) != filling || writers == 0 || writers > m_.slots()) return;
    if (!m_.broken(Guard::seal_all)) {
      for (unsigned k = 0; k < writers; ++k) {
        // SYNC POINT seal (acquire)
        if (m_.load(m_.slot_phase(k)) != PhaseWord{Phase::committed, sequence}.pack()) return;
      }
    }
    m_.cas(m_.half_state(half), filling, HalfWord{HalfState::sealed, sequence}.pack());
  }
  /// Ends an open fill without a version. Anyone may call it; false if the fill was over already.
  bool abort(unsigned half, std::uint64_t sequence) {
    const auto target = m_.broken(Guard::abort_quarantines) ? HalfState::free : HalfState::quarantined;
    if (m_.broken(Guard::abort_names_fill)) {
      const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
      if (now.code != HalfState::filling) return false;
      return m_.cas(m_.half_state(half), now.pack(), HalfWord{target, now.sequence}.pack());
    }
    return m_.cas(m_.half_state(half), HalfWord{HalfState::filling, sequence}.pack(),
                  HalfWord{target, sequence}.pack());
  }
  void mark_idle(unsigned slot) { m_.store(m_.slot_phase(slot), PhaseWord{Phase::idle, 0}.pack()); }

  /// What became of a fill.
  FillState fill_state(unsigned half, std::uint64_t sequence) {
    const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
    if (now.sequence == sequence) {
      if (now.code == HalfState::filling) return FillState::open;
      if (now.code == HalfState::quarantined) return FillState::aborted;
      if (holds_version(now.code)) return FillState::sealed;
    }
    return FillState::moved_on;
  }

  // ---- the agent --------------------------------------------------------------------------------------------

  /// Ends fills that a dead writer takes part in and cannot complete.
  void reap_fill(unsigned half) {
    const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
    if (now.code != HalfState::filling) return;
    try_seal(half, now.sequence);  // it may have died after its COMMITTED: then the version is whole
    if (m_.broken(Guard::reap_dead)) return;
    for (unsigned k = 0; k < m_.slots(); ++k) {
      const auto phase = PhaseWord::unpack(m_.load(m_.slot_phase(k)));
      const bool taking_part =
          phase.sequence == now.sequence && (phase.code == Phase::joined || phase.code == Phase::copying);
      if (taking_part && (m_.load(m_.slot_owner(k)) == 0 || m_.owner_dead(k))) {
        abort(half, now.sequence);
        return;
      }
    }
  }

  /// QUARANTINED → FREE once no living writer is inside a copy of that fill. True if the half is not quarantined
  /// (any more). `held_sequence`: the fill of this half that the agent itself reads while it is written; 0 if none.
  bool settle(unsigned half, std::uint64_t held_sequence) {
    const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
    if (now.code != HalfState::quarantined) return true;
    if (now.sequence == held_sequence && !m_.broken(Guard::settle_held)) return false;
    for (unsigned k = 0; k < m_.slots() && !m_.broken(Guard::settle_copying); ++k) {
      // SYNC POINT copy (the state was made QUARANTINED before; now look who copies) and copied (acquire)
      if (m_.load(m_.slot_phase(k)) != PhaseWord{Phase::copying, now.sequence}.pack()) continue;
      if (m_.load(m_.slot_owner(k)) == 0 || m_.owner_dead(k) || m_.broken(Guard::settle_proof)) continue;
      return false;
    }
    m_.cas(m_.half_state(half), now.pack(), HalfWord{HalfState::free, now.sequence}.pack());
    return true;
  }

  /// Elements of a batch that are in place in a fill. SYNC POINT progress (acquire).
  std::uint64_t elements_done(unsigned half, std::uint64_t batch, std::uint64_t sequence) {
    const auto word = ProgressWord::unpack(m_.load(m_.progress(half, batch)));
    if (word.sequence != ProgressWord::tag(sequence) && !m_.broken(Guard::progress_names_fill)) return 0;
    return word.elements;
  }

  /// Before a slot changes hands: its last owner (dead, gone with a goodbye, or replaced by exec) takes part in no open
  /// fill any more.
  void end_part(unsigned slot) {
    if (m_.broken(Guard::grant_ends_fill)) return;
    const auto phase = PhaseWord::unpack(m_.load(m_.slot_phase(slot)));
    for (unsigned h = 0; h < kHalves; ++h) {
      const auto now = HalfWord::unpack(m_.load(m_.half_state(h)));
      if (now.code != HalfState::filling || now.sequence != phase.sequence) continue;
      try_seal(h, now.sequence);
      abort(h, now.sequence);
    }
  }

  /// The half to activate next: of two sealed ones the older. kNone, or kAgain if something moved meanwhile.
  static constexpr int kNone = -1;
  static constexpr int kAgain = -2;
  int next_sealed() {
    HalfWord now[kHalves];
    for (unsigned h = 0; h < kHalves; ++h) now[h] = HalfWord::unpack(m_.load(m_.half_state(h)));
    // Two versions can be sealed between the loads above, and the newer one would be seen alone.
    if (!m_.broken(Guard::sealed_recheck) && m_.load(m_.half_state(0)) != now[0].pack()) return kAgain;
    int best = kNone;
    for (unsigned h = 0; h < kHalves; ++h) {
      const bool ready =
          now[h].code == HalfState::sealed || (m_.broken(Guard::activate_sealed) && now[h].code == HalfState::filling);
      if (!ready) continue;
      const bool older = best < 0 || now[h].sequence < now[best].sequence;
      if (best < 0 || older != m_.broken(Guard::sealed_in_order)) best = static_cast<int>(h);
    }
    return best;
  }

  /// SEALED → ACTIVE, and the other half ACTIVE → RETIRING. False if `half` is not sealed, or the other half is still
  /// retiring (its readers would lose track of which is which).
  bool activate(unsigned half, std::uint64_t sequence) {
    const auto mine = m_.load(m_.half_state(half));
    const auto sealed = HalfWord{HalfState::sealed, sequence}.pack();
    if (mine != sealed && !m_.broken(Guard::activate_sealed)) return false;
    const unsigned other = 1 - half;
    if (HalfWord::unpack(m_.load(m_.half_state(other))).code == HalfState::retiring) return false;
    if (m_.broken(Guard::retire_before_active)) {
      m_.cas(m_.half_state(half), mine, HalfWord{HalfState::active, sequence}.pack());
      retire(other);
      return true;
    }
    // First out, then in: an agent that dies between leaves RETIRING + SEALED, never two ACTIVE.
    retire(other);
    // SYNC POINT publish: readers are told of the half only after this.
    return m_.cas(m_.half_state(half), mine, HalfWord{HalfState::active, sequence}.pack());
  }

  /// RETIRING → FREE. The caller knows that its diff and its leases on the half have ended.
  /// SYNC POINT retire (release): all reads come before it; the next fill: claim (acquire on FREE).
  bool free_retired(unsigned half, std::uint64_t sequence) {
    return m_.cas(m_.half_state(half), HalfWord{HalfState::retiring, sequence}.pack(),
                  HalfWord{HalfState::free, sequence}.pack());
  }

  /// A new agent takes over: its predecessor's readers and diff are dead with it.
  void adopt_half(unsigned half) {
    const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
    if (now.code == HalfState::retiring && !m_.broken(Guard::adopt_frees)) free_retired(half, now.sequence);
  }

  // ---- readers without holding

  /// Whether the half still has the content of this fill, sealed and not yet given back to the writers. Who has read
  /// its bytes before, and asks afterwards, knows that they were of it. Needs half_state() and load() alone.
  bool holds(unsigned half, std::uint64_t sequence) {
    if (m_.broken(Guard::read_recheck)) return true;
    const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
    return holds_version(now.code) && now.sequence == sequence;
  }

 private:
  void retire(unsigned half) {
    const auto now = HalfWord::unpack(m_.load(m_.half_state(half)));
    if (now.code != HalfState::active) return;
    m_.cas(m_.half_state(half), now.pack(), HalfWord{HalfState::retiring, now.sequence}.pack());
  }
  void load_info(unsigned half, InfoWords& info) {
    for (unsigned w = 0; w < m_.info_words(); ++w) info[w] = m_.load(m_.half_info(half, w));
  }
  void store_info(unsigned half, const InfoWords& info) {
    for (unsigned w = 0; w < m_.info_words(); ++w) m_.store(m_.half_info(half, w), info[w]);
  }

  M& m_;
};

}  // namespace deltasync::shm
