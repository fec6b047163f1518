// Who the members are, and which tiles each is asked for.
#include <algorithm>
#include <mutex>
#include <utility>

#include "base/log.hpp"
#include "format/coverage.hpp"
#include "receiver/parts/at_once.hpp"
#include "receiver/parts/parts_receiver.hpp"
#include "receiver/parts/shares.hpp"

namespace deltasync::receiver {
namespace {

/// For a member whose tiles others have too: to answer, and until one that did not is asked again.
constexpr auto kAnswerLimit = std::chrono::seconds(2);
constexpr auto kAwayPause = std::chrono::seconds(20);

}  // namespace

std::string PartsReceiver::describe(const Member& member) const {
  return "member " + member.at.name + " (" + member.at.endpoint + ")";
}

Error PartsReceiver::about(const Member& member, Error error) const {
  return std::move(error).with_context(describe(member));
}

std::vector<PartsReceiver::Member*> PartsReceiver::needed() {
  std::vector<Member*> list;
  for (Member& member : members_) {
    if (member.target != nullptr) list.push_back(&member);
  }
  return list;
}

/// Of the same job, and the one that it should be.
Result<Part> PartsReceiver::part_of(std::size_t number, const Sidecar& sidecar, const Layout& layout) const {
  if (sidecar.part.empty()) {
    return Error(Errc::layout_mismatch, "its agent serves a whole model, no part of one");
  }
  DS_ASSIGN(Part part, decode_part(sidecar.part, layout));
  if (part.whole->digest() != part_.whole->digest()) {
    return Error(Errc::layout_mismatch, "its agent serves a part of layout " + to_string(part.whole->digest()) +
                                            ", the others parts of " + to_string(part_.whole->digest()));
  }
  const bool same_members =
      part.members.size() == part_.members.size() && part.self == number &&
      std::equal(part.members.begin(), part.members.end(), part_.members.begin(),
                 [](const auto& a, const auto& b) { return a.name == b.name && a.endpoint == b.endpoint; });
  if (!same_members) {
    return Error(Errc::layout_mismatch, "its agent is that of member " + part.members[part.self].name + " of " +
                                            std::to_string(part.members.size()) + ", of another job");
  }
  return part;
}

Status PartsReceiver::take_member(Member& member, std::size_t number, std::unique_ptr<ReceiverImpl> receiver) {
  DS_ASSIGN(const Part part, part_of(number, receiver->sidecar(), *receiver->layout()));
  DS_ASSIGN(PartMap map, PartMap::build(receiver->layout(), part));
  member.map = std::make_unique<PartMap>(std::move(map));
  member.receiver = std::move(receiver);
  return {};
}

Status PartsReceiver::connect_member(Member& member, std::size_t number, const CallContext& until) {
  ReceiverOptions options = options_;
  options.endpoint = member.at.endpoint;
  const auto count = static_cast<unsigned>(part_.members.size());
  options.streams = std::max(1u, options.streams / count);
  options.threads = std::max(1u, pool_.size() / count);
  options.scrub_tiles = 0;  // the whole target's are scrubbed
  options.attest_commits = false;
  DS_ASSIGN(auto receiver, ReceiverImpl::connect(std::move(options), tuning_, until));
  return take_member(member, number, std::move(receiver));
}

/// Those that are not connected, all at once. What fails is noted; a member of another job is an error.
Status PartsReceiver::connect_missing(const CallContext& until) {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].receiver == nullptr) missing.push_back(i);
  }
  std::vector<Status> results(missing.size());
  at_once(missing.size(), until, [&](std::size_t i, const CallContext& each) {
    results[i] = connect_member(members_[missing[i]], missing[i], each);
    return true;
  });
  for (std::size_t i = 0; i < missing.size(); ++i) {
    Member& member = members_[missing[i]];
    member.tried = std::chrono::steady_clock::now();
    if (results[i].ok()) {
      member.away.reset();
      continue;
    }
    const Errc code = results[i].error().code();
    Error why = about(member, std::move(results[i]).error());
    if (code != Errc::connection && code != Errc::timed_out) return why;
    member.away = std::move(why);
  }
  return {};
}

Result<std::unique_ptr<PartsReceiver>> PartsReceiver::connect(std::unique_ptr<ReceiverImpl> first,
                                                              ReceiverOptions options, const Tuning& tuning,
                                                              const CallContext& until) {
  std::unique_ptr<PartsReceiver> made(new PartsReceiver(std::move(options), tuning));
  DS_ASSIGN(made->part_, decode_part(first->sidecar().part, *first->layout()));
  made->layout_ = made->part_.whole;
  made->sidecar_ = made->part_.sidecar;
  for (const Part::Member& member : made->part_.members) {
    made->members_.emplace_back();
    made->members_.back().at = member;
  }
  made->members_[made->part_.self].at.endpoint = made->options_.endpoint;  // as it was reached
  first.reset();  // its streams and threads are for a receiver of everything
  DS_TRY(made->connect_missing(until));
  return made;
}

// ---- shares --------------------------------------------------------------------------------------------------------

Result<std::vector<std::vector<wire::TileRange>>> PartsReceiver::divide_tiles(const TileSet& wanted) const {
  std::vector<const PartMap*> parts;
  for (const Member& member : members_) parts.push_back(member.away ? nullptr : member.map.get());
  auto shares = divide(*layout_, wanted, parts);
  if (shares.ok()) return shares;
  Error error = std::move(shares).error();
  for (const Member& member : members_) {
    if (member.away) return Error(member.away->code(), error.message() + "; " + member.away->to_string());
  }
  return error;
}

/// Has no deadline: a member that was passed over would keep its tiles as they are.
Status PartsReceiver::share_out() {
  discard_full();
  DS_ASSIGN(const auto shares, divide_tiles(tiles_));
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    member.target = nullptr;
    if (member.receiver == nullptr || shares[i].empty()) continue;
    DS_ASSIGN(TileSet tiles, TileSet::make(*member.map->layout(), shares[i]));
    auto* const bound = new PartTarget(*joint_, *member.map);
    DS_TRY(member.receiver->bind_tiles(std::unique_ptr<Target>(bound), std::move(tiles), CallOptions()));
    member.target = bound;
    member.target->look_at_committed();
  }
  note_replaceable();
  std::vector<PartsStatus::Member> asked;
  std::vector<const ReceiverImpl*> bringing;
  for (Member* member : needed()) {
    asked.push_back({describe(*member), member->receiver->status()});
    bringing.push_back(member->receiver.get());
  }
  status_->set(std::move(asked));
  const std::lock_guard lock(bringing_mutex_);
  bringing_ = std::move(bringing);
  return {};
}

/// Of each member whether others have all that is asked from it.
void PartsReceiver::note_replaceable() {
  std::vector<std::uint8_t> holders(static_cast<std::size_t>(layout_->tile_count()), 0);
  for (const Member& member : members_) {
    if (member.away || member.map == nullptr) continue;
    for (std::uint64_t tile = 0; tile < member.map->layout()->tile_count(); ++tile) {
      std::uint8_t& count = holders[member.map->tile_in_whole(tile)];
      count = static_cast<std::uint8_t>(std::min(count + 1, 2));
    }
  }
  for (Member* member : needed()) {
    const auto& ranges = member->target->kept()->ranges();
    member->replaceable = std::all_of(ranges.begin(), ranges.end(), [&](const wire::TileRange& range) {
      for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
        if (holders[member->map->tile_in_whole(tile)] < 2) return false;
      }
      return true;
    });
  }
}

Status PartsReceiver::look_at_members(const CallContext& until) {
  bool changed = false;
  for (std::size_t i = 0; i < members_.size() && !until.over(); ++i) {
    Member& member = members_[i];
    if (member.away && std::chrono::steady_clock::now() - member.tried < kAwayPause) continue;
    if (!member.away && (member.target == nullptr || !member.replaceable)) continue;
    member.tried = std::chrono::steady_clock::now();
    const CallContext limit = until.earlier(Deadline::after(kAnswerLimit));
    Status there = member.receiver == nullptr ? connect_member(member, i, limit) : member.receiver->is_there(limit);
    if (until.over()) break;  // which says nothing of the member
    if (there.ok() && member.away) {
      log::info("member_back name={} endpoint={}", member.at.name, member.at.endpoint);
      member.away.reset();
      changed = true;
    } else if (!there.ok() && !member.away) {
      leave_out(member, there.error());
      changed = true;
    }
  }
  if (changed) {
    members_changed_ = true;
    DS_TRY(share_out());
  }
  return until.check("asking the members");
}

/// Others have its tiles, so that share_out() finds somebody for each.
void PartsReceiver::leave_out(Member& member, const Error& why) {
  log::warn("member_away name={} endpoint={} error=\"{}\" effect=\"others give its tiles\"", member.at.name,
            member.at.endpoint, why.to_string());
  member.away = about(member, why);
  member.tried = std::chrono::steady_clock::now();
  note_replaceable();
}

}  // namespace deltasync::receiver
