// What the ranks of a group write into the registers that they share, and how their votes become a verdict. Pure.
//
// Values are JSON objects; commit_protocol.md has their members.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync::commit {

struct Vote {
  std::optional<std::string> reason;  ///< why this rank votes no; nothing: it votes yes
  std::string subject;                ///< what about: ranks that vote about different things have no agreement
  std::string doubt;                  ///< what the others are to know of this rank's weights
  std::string lacks;                  ///< bits, as a number in hex: none of them may be set on every rank; empty: 0
};

enum class Outcome : std::uint8_t {
  yes,
  no,
  unknown,  ///< this rank has voted yes, and cannot know what the others read
};
std::string_view to_string(Outcome outcome) noexcept;

struct Verdict {
  Outcome outcome = Outcome::no;
  std::string reason;  ///< who voted no and why, who was missing, or why the outcome is unknown; of a yes: empty
  std::string doubt;   ///< what ranks say of their weights beside it; that of those who were heard

  bool operator==(const Verdict&) const = default;
};

std::string encode(const Vote& vote);
/// Of an outcome that the group has: a no has a reason, a yes has none.
std::string encode(const Verdict& verdict);
/// corrupt: it is no vote; the message is the text.
Result<Vote> decode_vote(std::string_view text);
Result<Verdict> decode_verdict(std::string_view text);

/// What the votes of all ranks come to, in the order of the ranks.
struct Tally {
  std::string objection;  ///< why it is no yes; empty: nothing but `lacking`
  std::string lacking;    ///< bits that all of them have set, in hex; empty: none
};
Tally count(const std::vector<Vote>& votes);

/// What the votes say of weights, one after the other.
std::string doubts_of(const std::vector<Vote>& votes);
/// "rank 3", "ranks 0, 2"
std::string name_ranks(const std::vector<std::uint32_t>& ranks);
/// Bits that both have set, in hex without leading zeros; empty: none.
std::string common_bits(std::string_view a, std::string_view b);

}  // namespace deltasync::commit
