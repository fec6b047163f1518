// What a rank and the coordinator of its group say to each other (commit_protocol.md), in the messages and after
// the `hello` of format/wire.hpp. A rank reports, the coordinator answers with an order.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "format/commit_messages.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

inline constexpr std::uint64_t kRankMessageBytesMax = 16u << 10;
/// Of this conversation, which does not change whenever that of agents does.
inline constexpr std::uint16_t kCommitProtocol = 4;

/// Rank → coordinator, once. proof: net::rank_proof; zeros without a token.
struct RankJoin {
  static constexpr Type kType = Type::rank_join;
  std::uint16_t protocol = kCommitProtocol;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint64_t incarnation = 0;
  std::array<std::uint8_t, 32> nonce{};
  std::array<std::uint8_t, 32> proof{};
  std::string name;  ///< encode() cuts it to kPeerNameBytesMax
  std::vector<std::byte> encode() const;
  static Result<RankJoin> decode(ByteSpan payload);
};
/// Coordinator → rank. proof: net::coordinator_proof; zeros without a token.
struct RankWelcome {
  static constexpr Type kType = Type::rank_welcome;
  std::array<std::uint8_t, 32> proof{};
  std::uint64_t log = 0;
  std::uint64_t term = 0;
  std::uint64_t incarnation = 0;  ///< the latest of this rank that the coordinator has heard of, this one included
  std::vector<std::byte> encode() const;
  static Result<RankWelcome> decode(ByteSpan payload);
};
struct RankReport {
  static constexpr Type kType = Type::rank_report;
  commit::Report report;
  std::vector<std::byte> encode() const;
  static Result<RankReport> decode(ByteSpan payload);
};
struct RankOrder {
  static constexpr Type kType = Type::rank_order;
  commit::Order order;
  std::vector<std::byte> encode() const;
  static Result<RankOrder> decode(ByteSpan payload);
};

}  // namespace deltasync::wire
