// The byte layout of the shared segment: one control block, the metadata, then the two halves. Data only: what may
// happen to it is in shm/protocol.hpp, who may do it in shm/roles.hpp, both in prose in shm_protocol.md.
//
//   0                          control block (kControlBytes, below)
//   layout_offset              canonical layout encoding      ┐ constant after creation,
//   sidecar_offset             sidecar encoding               ┘ hashed together
//   progress_offset            progress words of half 0, then those of half 1
//   half_offset[0]             half 0, 2 MiB-aligned, half_bytes rounded up to 2 MiB
//   half_offset[1]             half 1, likewise
//   segment_bytes              end of the file
//
//   control block            writer of the field
//   0x0000  header           creator; constant once ready
//   0x0100  ready            creator, last, with release
//   0x0180  agent            the agent that adopted the segment
//   0x0200  agent_bell       anyone (add)       "agent, look"
//   0x0280  writer_bell      anyone (add)       "writers, look"
//   0x0300  state[2]         anyone, by compare-and-swap only
//   0x0400  info[2]          slot 0, while the half is FREE
//   0x0600  owner[64]        the agent
//   0x2600  slot[64]         the process that owns the slot
//
// Offsets only, never addresses: each process maps the segment somewhere else. Every mutable field of the control block
// has one writer and its own pair of cache lines, so that polling one never slows the writer of another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace deltasync::shm {

inline constexpr std::uint64_t kSegmentMagic = 0x31474553'43595344;  // "DSYCSEG1"
inline constexpr std::uint64_t kSegmentReady = 0x59444145'52434e59;  // "YNCREADY"
inline constexpr std::uint32_t kSegmentFormat = 2;
inline constexpr unsigned kHalves = 2;
inline constexpr unsigned kSlotsMax = 64;
inline constexpr std::size_t kLineBytes = 128;  ///< two lines: adjacent-line prefetch pairs them
inline constexpr std::uint64_t kHalfAlignment = 2u << 20;
inline constexpr std::uint64_t kSegmentBytesMax = std::uint64_t{1} << 45;
inline constexpr std::uint64_t kMetadataBytesMax = std::uint64_t{4} << 30;
inline constexpr std::uint64_t kProgressWordsMax = std::uint64_t{1} << 27;

/// Codes are four bits apart from each other (a flipped bit is never another state), and none is zero.
enum class HalfState : std::uint8_t {
  free = 0x0f,         ///< holds nothing that anyone may read
  filling = 0x33,      ///< writers copy into it
  sealed = 0x55,       ///< whole; not served yet
  active = 0x69,       ///< served
  retiring = 0x5a,     ///< no longer offered; the diff and old leases may still read it
  quarantined = 0x3c,  ///< an aborted fill; a writer may still be inside a copy
};
/// What one writer does, in its own phase word.
enum class Phase : std::uint8_t { idle = 0x0f, joined = 0x33, copying = 0x55, committed = 0x69 };

constexpr bool is_half_state(std::uint64_t code) noexcept {
  return code == 0x0f || code == 0x33 || code == 0x55 || code == 0x69 || code == 0x5a || code == 0x3c;
}
constexpr bool is_phase(std::uint64_t code) noexcept {
  return code == 0x0f || code == 0x33 || code == 0x55 || code == 0x69;
}
/// "FREE", "FILLING" … as the documents spell them.
constexpr std::string_view to_string(HalfState state) noexcept {
  switch (state) {
    case HalfState::free: return "FREE";
    case HalfState::filling: return "FILLING";
    case HalfState::sealed: return "SEALED";
    case HalfState::active: return "ACTIVE";
    case HalfState::retiring: return "RETIRING";
    case HalfState::quarantined: return "QUARANTINED";
  }
  return "INVALID";
}
constexpr std::string_view to_string(Phase phase) noexcept {
  switch (phase) {
    case Phase::idle: return "IDLE";
    case Phase::joined: return "JOINED";
    case Phase::copying: return "COPYING";
    case Phase::committed: return "COMMITTED";
  }
  return "INVALID";
}

/// A state or phase together with the fill that it belongs to, in one 64-bit word: code in the top 8 bits, the fill
/// sequence below. Sequences grow with every fill of the segment, so that a word never comes back.
inline constexpr std::uint64_t kSequenceMax = (std::uint64_t{1} << 56) - 1;
template <class Code>
struct TaggedWord {
  Code code{};
  std::uint64_t sequence = 0;

  static constexpr TaggedWord unpack(std::uint64_t word) noexcept {
    return {static_cast<Code>(word >> 56), word & kSequenceMax};
  }
  constexpr std::uint64_t pack() const noexcept {
    return static_cast<std::uint64_t>(code) << 56 | (sequence & kSequenceMax);
  }
  constexpr bool operator==(const TaggedWord&) const = default;
};
using HalfWord = TaggedWord<HalfState>;
using PhaseWord = TaggedWord<Phase>;

/// How many elements of one batch are in place: the fill in the upper bits, the count below. All writers add to it. A
/// complete fill counts in every word, so that an equal tag of 2^40 fills ago is not met.
inline constexpr unsigned kProgressCountBits = 24;
struct ProgressWord {
  std::uint64_t sequence = 0;  ///< its low 40 bits
  std::uint64_t elements = 0;

  static constexpr std::uint64_t tag(std::uint64_t sequence) noexcept {
    return sequence & (~std::uint64_t{0} >> kProgressCountBits);
  }
  static constexpr ProgressWord unpack(std::uint64_t word) noexcept {
    return {word >> kProgressCountBits, word & ((std::uint64_t{1} << kProgressCountBits) - 1)};
  }
  constexpr std::uint64_t pack() const noexcept { return tag(sequence) << kProgressCountBits | elements; }
};

/// Constant once `ready` is set.
struct alignas(kLineBytes) SegmentHeader {
  std::uint64_t magic;
  std::uint32_t format;
  std::uint32_t control_bytes;
  std::uint64_t segment_bytes;  ///< the file's size, exactly
  std::uint64_t generation;
  std::uint64_t half_bytes;  ///< what the layout needs; the reserved range is rounded up to kHalfAlignment
  std::uint64_t half_offset[kHalves];
  std::uint64_t layout_offset;
  std::uint64_t layout_bytes;
  std::uint64_t sidecar_offset;
  std::uint64_t sidecar_bytes;
  std::uint64_t progress_offset;
  std::uint64_t progress_words;  ///< of one half: the layout's batches
  std::uint8_t layout_digest[16];
  std::uint64_t metadata_hash;  ///< XXH3-64 of everything from layout_offset to the end of the sidecar
  std::uint64_t header_hash;    ///< XXH3-64 of the bytes before it
  std::uint64_t reserved[15];   ///< zero
};

struct alignas(kLineBytes) ReadyLine {
  std::uint64_t word;  ///< kSegmentReady once everything else is in place
  std::uint64_t reserved[15];
};

/// Which process adopted the segment last. For messages; the lock file is what excludes a second agent.
struct alignas(kLineBytes) AgentLine {
  std::uint64_t pid;
  std::uint64_t start_ticks;
  std::uint64_t reserved[14];
};

/// A futex word that only counts. What happened is found in the state words, so that a lost ring costs time only.
struct alignas(kLineBytes) Bell {
  std::uint32_t rings;
  std::uint32_t reserved[31];
};

struct alignas(kLineBytes) HalfStateLine {
  std::uint64_t word;  ///< HalfWord
  std::uint64_t reserved[15];
};

/// The version that a half holds: 64-bit words, so that a concurrent reader can load them atomically.
inline constexpr unsigned kInfoEpoch = 0;
inline constexpr unsigned kInfoNumber = 1;
inline constexpr unsigned kInfoWriters = 2;
inline constexpr unsigned kInfoLabel = 3;
inline constexpr unsigned kInfoLabelWords = 16;  ///< 127 bytes of UTF-8 and at least one NUL
inline constexpr unsigned kInfoWords = kInfoLabel + kInfoLabelWords;
struct alignas(kLineBytes) HalfInfo {
  std::uint64_t words[kInfoWords];
  std::uint64_t reserved[13];
};

/// Which process a writer slot is granted to. pid 0: nobody. The agent writes start_ticks before pid.
struct alignas(kLineBytes) SlotOwner {
  std::uint64_t pid;
  std::uint64_t start_ticks;
  std::uint64_t reserved[14];
};

struct alignas(kLineBytes) SlotWords {
  std::uint64_t phase;                ///< PhaseWord
  std::uint64_t request_deadline_ns;  ///< steady clock; not 0 while the writer waits for a FREE half
  std::uint64_t reserved[14];
};

struct ControlBlock {
  SegmentHeader header;
  ReadyLine ready;
  AgentLine agent;
  Bell agent_bell;
  Bell writer_bell;
  HalfStateLine state[kHalves];
  HalfInfo info[kHalves];
  SlotOwner owner[kSlotsMax];
  SlotWords slot[kSlotsMax];
};
inline constexpr std::uint64_t kControlBytes = sizeof(ControlBlock);

static_assert(sizeof(SegmentHeader) == 256 && sizeof(HalfInfo) == 256);
static_assert(sizeof(ReadyLine) == kLineBytes && sizeof(AgentLine) == kLineBytes && sizeof(Bell) == kLineBytes);
static_assert(sizeof(HalfStateLine) == kLineBytes && sizeof(SlotOwner) == kLineBytes &&
              sizeof(SlotWords) == kLineBytes);
static_assert(offsetof(SegmentHeader, half_bytes) == 32 && offsetof(SegmentHeader, progress_offset) == 88);
static_assert(offsetof(SegmentHeader, layout_digest) == 104 && offsetof(SegmentHeader, metadata_hash) == 120);
static_assert(offsetof(SegmentHeader, header_hash) == 128);
static_assert(offsetof(ControlBlock, ready) == 0x100 && offsetof(ControlBlock, agent) == 0x180);
static_assert(offsetof(ControlBlock, agent_bell) == 0x200 && offsetof(ControlBlock, writer_bell) == 0x280);
static_assert(offsetof(ControlBlock, state) == 0x300 && offsetof(ControlBlock, info) == 0x400);
static_assert(offsetof(ControlBlock, owner) == 0x600 && offsetof(ControlBlock, slot) == 0x2600);
static_assert(kControlBytes == 0x4600);
static_assert(std::is_trivially_copyable_v<ControlBlock> && std::is_standard_layout_v<ControlBlock>);
static_assert(std::has_unique_object_representations_v<ControlBlock>, "no padding anywhere");

/// Of one half: the next one's words begin on another line.
constexpr std::uint64_t progress_table_bytes(std::uint64_t words) noexcept {
  return (words * sizeof(std::uint64_t) + kLineBytes - 1) / kLineBytes * kLineBytes;
}

/// Where everything lies for given sizes; nothing if the sizes are beyond the limits.
struct SegmentPlan {
  std::uint64_t layout_offset = 0;
  std::uint64_t sidecar_offset = 0;
  std::uint64_t progress_offset = 0;
  std::uint64_t half_offset[kHalves] = {0, 0};
  std::uint64_t segment_bytes = 0;
};
constexpr std::optional<SegmentPlan> plan_segment(std::uint64_t half_bytes, std::uint64_t layout_bytes,
                                                  std::uint64_t sidecar_bytes, std::uint64_t progress_words) noexcept {
  if (half_bytes > kSegmentBytesMax / 4 || layout_bytes > kMetadataBytesMax || sidecar_bytes > kMetadataBytesMax ||
      progress_words > kProgressWordsMax) {
    return std::nullopt;
  }
  const auto round_up = [](std::uint64_t n, std::uint64_t to) { return (n + to - 1) / to * to; };
  SegmentPlan plan;
  plan.layout_offset = round_up(kControlBytes, 4096);
  plan.sidecar_offset = plan.layout_offset + round_up(layout_bytes, 64);
  plan.progress_offset = round_up(plan.sidecar_offset + sidecar_bytes, 4096);
  const std::uint64_t progress_bytes = kHalves * progress_table_bytes(progress_words);
  plan.half_offset[0] = round_up(plan.progress_offset + progress_bytes, kHalfAlignment);
  plan.half_offset[1] = plan.half_offset[0] + round_up(half_bytes, kHalfAlignment);
  plan.segment_bytes = plan.half_offset[1] + round_up(half_bytes, kHalfAlignment);
  return plan;
}

}  // namespace deltasync::shm
