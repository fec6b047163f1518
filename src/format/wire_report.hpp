// What a receiver and its agent tell each other of how things stand (wire_protocol.md "Reports and lag"); protocol
// 5. Durations, never times of a wall clock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "format/wire.hpp"

namespace deltasync::wire {

inline constexpr std::size_t kReportErrorBytesMax = 1024;

/// What a receiver has committed and how its last attempt ended. No reply.
struct Report {
  static constexpr Type kType = Type::report;
  std::uint64_t receiver = 0;  ///< random for each receiver, the same on all its connections
  Version committed;           ///< epoch 0: nothing
  std::string error;           ///< of the last pull or commit; empty: it succeeded. encode() cuts it
  bool operator==(const Report&) const = default;
  std::vector<std::byte> encode() const;
  static Result<Report> decode(ByteSpan payload);
};

/// How far behind is who holds this version? Reply: lag.
struct GetLag {
  static constexpr Type kType = Type::get_lag;
  VersionId held;  ///< epoch 0: nothing
  std::vector<std::byte> encode() const;
  static Result<GetLag> decode(ByteSpan payload);
};
struct Lag {
  static constexpr Type kType = Type::lag;
  Version newest;                   ///< that is served; epoch 0: none
  std::uint64_t versions = 0;       ///< published after the one that is held
  std::uint64_t behind_ns = 0;      ///< since the first of these was; 0 if there is none
  std::uint64_t newest_age_ns = 0;  ///< since the newest was; 0 if there is none
  std::uint64_t cut_off_ns = 0;     ///< since nobody brings newer ones any more; 0: somebody may
  std::vector<std::byte> encode() const;
  static Result<Lag> decode(ByteSpan payload);
};

/// From now on the agent says `alive` so often while it owes an answer on this connection. No reply.
struct KeepAlive {
  static constexpr Type kType = Type::keep_alive;
  std::uint32_t every_ms = 0;  ///< at least 1
  std::vector<std::byte> encode() const;
  static Result<KeepAlive> decode(ByteSpan payload);
};

inline constexpr std::uint64_t kParentsMax = 64;  ///< a count: agents that a version comes through
inline constexpr std::size_t kEndpointBytesMax = 512;

/// An agent that versions come through.
struct Parent {
  std::uint64_t instance = 0;  ///< as Hello::instance
  std::string endpoint;        ///< as the relay that pulls from it knows it. encode() cuts it
  bool operator==(const Parent&) const = default;
};
/// The receiver is a relay, which writes to the agent of this instance. Reply: parents, or invalid_argument where that
/// agent is among them.
struct RelayTo {
  static constexpr Type kType = Type::relay_to;
  std::uint64_t instance = 0;
  std::string endpoint;  ///< where others may pull from that agent; empty: not said. encode() cuts it
  std::vector<std::byte> encode() const;
  static Result<RelayTo> decode(ByteSpan payload);
};
/// Where the agent's versions come from, the nearest first; none: a trainer writes to it.
struct Parents {
  static constexpr Type kType = Type::parents;
  std::vector<Parent> list;      ///< encode() keeps the first kParentsMax
  std::uint64_t cut_off_ns = 0;  ///< since no newer ones come from there; 0: they may
  std::vector<std::byte> encode() const;
  static Result<Parents> decode(ByteSpan payload);
};
/// The same, said to the agent by the relay that writes to it: of the one that it pulls from.
struct TrainerParents : Parents {
  static constexpr Type kType = Type::trainer_parents;
  static Result<TrainerParents> decode(ByteSpan payload);
};

/// Said by a relay to the agent that it writes to, with a descriptor of the memory (shm/arriving_memory.hpp) where this
/// version comes together; or that none does any more. No reply.
struct TrainerArrival {
  static constexpr Type kType = Type::trainer_arrival;
  Digest128 layout;
  Version version;  ///< epoch 0: none, and the rest is empty
  Digest128 root;
  std::vector<std::uint64_t> digests;  ///< of all tiles, in order
  std::vector<std::byte> encode() const;
  static Result<TrainerArrival> decode(ByteSpan payload);
};

/// Said by a relay to the agent that it writes to: the delta to this version comes, and its parts follow as
/// trainer_frames; or none does any more. No reply.
struct TrainerDelta {
  static constexpr Type kType = Type::trainer_delta;
  Digest128 layout;
  Version from;
  Version to;  ///< epoch 0: none comes, and the rest is empty
  Digest128 from_root;
  Digest128 to_root;
  // Of the whole delta, as the relay's own plan says.
  std::uint64_t frames = 0;
  std::uint64_t frame_bytes = 0;
  std::uint64_t changed = 0;
  std::vector<std::byte> encode() const;
  static Result<TrainerDelta> decode(ByteSpan payload);
};

/// A part of that delta, which the relay has verified: all that changes in these tiles. No reply.
struct TrainerFrames {
  static constexpr Type kType = Type::trainer_frames;
  static constexpr std::uint64_t kHeadBytes = 3 * sizeof(std::uint64_t);
  TileRange tiles;
  std::vector<std::byte> frame;  ///< one (delta_format.md); empty: nothing changes
  std::vector<std::byte> encode() const;
  static Result<TrainerFrames> decode(ByteSpan payload);
};

inline constexpr std::uint64_t kElsewhereMax = 64;  ///< a count
/// Agents that serve the same versions: in place of a plan_reply. The receiver asks the first that it can reach.
struct Elsewhere {
  static constexpr Type kType = Type::elsewhere;
  std::vector<std::string> endpoints;  ///< encode() keeps the first kElsewhereMax, and cuts them
  std::vector<std::byte> encode() const;
  static Result<Elsewhere> decode(ByteSpan payload);
};

/// Why a relay that writes to the agent of `instance` must not pull from one with these parents, itself the first;
/// empty: it may.
std::string cycle_of(const std::vector<Parent>& parents, std::uint64_t instance);

}  // namespace deltasync::wire
