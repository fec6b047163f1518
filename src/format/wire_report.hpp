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

}  // namespace deltasync::wire
