#include "commit/votes.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace deltasync::commit {
namespace {

using nlohmann::json;

std::string written(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

Error malformed(std::string_view what, std::string_view text) {
  return {Errc::corrupt, "this is no " + std::string(what) + ": " + std::string(text)};
}

json parsed(std::string_view text) {
  return json::parse(text, nullptr, false);
}

/// The member's text; empty if there is none; nothing if it is no text.
std::optional<std::string> text_of(const json& object, const char* member) {
  const auto found = object.find(member);
  if (found == object.end()) return "";
  if (!found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

bool is_hex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

unsigned digit(char hex) {
  return static_cast<unsigned>(hex <= '9' ? hex - '0' : hex - 'a' + 10);
}

void append(std::string& list, std::string_view item, std::string_view separator) {
  if (!list.empty()) list += separator;
  list += item;
}

/// Empty if all ranks vote about the same.
std::string different_subjects(const std::vector<Vote>& votes) {
  std::vector<std::pair<std::string_view, std::size_t>> subjects;  // and the last rank that votes about it
  for (std::size_t rank = 0; rank < votes.size(); ++rank) {
    const auto known = std::find_if(subjects.begin(), subjects.end(),
                                    [&](const auto& subject) { return subject.first == votes[rank].subject; });
    if (known == subjects.end()) {
      subjects.emplace_back(votes[rank].subject, rank);
    } else {
      known->second = rank;
    }
  }
  if (subjects.size() < 2) return "";
  std::string list;
  for (const auto& [subject, rank] : subjects) {
    append(list, std::string(subject) + " on rank " + std::to_string(rank), ", ");
  }
  return "the ranks do not speak of the same: " + list;
}

}  // namespace

std::string_view to_string(Outcome outcome) noexcept {
  switch (outcome) {
    case Outcome::yes: return "yes";
    case Outcome::no: return "no";
    case Outcome::unknown: return "unknown";
  }
  return "";
}

std::string encode(const Vote& vote) {
  json object = {{"subject", vote.subject}, {"doubt", vote.doubt}, {"lacks", vote.lacks}};
  object["reason"] = vote.reason ? json(*vote.reason) : json(nullptr);
  return written(object);
}

std::string encode(const Verdict& verdict) {
  return written({{"reason", verdict.reason}, {"doubt", verdict.doubt}});
}

Result<Vote> decode_vote(std::string_view text) {
  const json object = parsed(text);
  if (!object.is_object()) return malformed("vote", text);
  const auto reason = object.find("reason");
  if (reason == object.end() || !(reason->is_null() || reason->is_string())) return malformed("vote", text);
  Vote vote;
  if (reason->is_string()) vote.reason = reason->get<std::string>();
  auto subject = text_of(object, "subject");
  auto doubt = text_of(object, "doubt");
  auto lacks = text_of(object, "lacks");
  if (!subject || !doubt || !lacks || !is_hex(*lacks)) return malformed("vote", text);
  vote.subject = *std::move(subject);
  vote.doubt = *std::move(doubt);
  vote.lacks = *std::move(lacks);
  return vote;
}

Result<Verdict> decode_verdict(std::string_view text) {
  const json object = parsed(text);
  if (!object.is_object() || !object.contains("reason")) return malformed("verdict", text);
  auto reason = text_of(object, "reason");
  auto doubt = text_of(object, "doubt");
  if (!reason || !doubt) return malformed("verdict", text);
  const Outcome outcome = reason->empty() ? Outcome::yes : Outcome::no;
  return Verdict{outcome, *std::move(reason), *std::move(doubt)};
}

Tally count(const std::vector<Vote>& votes) {
  Tally tally;
  for (const Vote& vote : votes) {
    if (vote.reason) append(tally.objection, *vote.reason, "; ");
  }
  if (tally.objection.empty()) tally.objection = different_subjects(votes);
  if (!tally.objection.empty() || votes.empty()) return tally;
  tally.lacking = common_bits(votes[0].lacks, votes[0].lacks);
  for (const Vote& vote : votes) tally.lacking = common_bits(tally.lacking, vote.lacks);
  return tally;
}

std::string doubts_of(const std::vector<Vote>& votes) {
  std::string all;
  for (const Vote& vote : votes) {
    if (!vote.doubt.empty()) append(all, vote.doubt, "; ");
  }
  return all;
}

std::string name_ranks(const std::vector<std::uint32_t>& ranks) {
  std::string list;
  for (const std::uint32_t rank : ranks) append(list, std::to_string(rank), ", ");
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

std::string common_bits(std::string_view a, std::string_view b) {
  const std::size_t digits = std::min(a.size(), b.size());
  a.remove_prefix(a.size() - digits);
  b.remove_prefix(b.size() - digits);
  std::string common;
  for (std::size_t i = 0; i < digits; ++i) {
    const unsigned both = digit(a[i]) & digit(b[i]);
    if (both != 0 || !common.empty()) common += "0123456789abcdef"[both];
  }
  return common;
}

}  // namespace deltasync::commit
