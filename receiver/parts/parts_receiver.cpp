#include "receiver/parts/parts_receiver.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <thread>
#include <utility>

#include "receiver/parts/at_once.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::receiver {
namespace {

constexpr unsigned kPullThreadsMax = 16;

unsigned pool_threads(unsigned asked) {
  return asked != 0 ? asked : std::clamp(std::thread::hardware_concurrency(), 1u, kPullThreadsMax);
}

}  // namespace

std::vector<std::string> split_endpoints(std::string_view list) {
  std::vector<std::string> endpoints;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (comma != 0) endpoints.emplace_back(list.substr(0, comma));
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return endpoints;
}

PartsReceiver::PartsReceiver(ReceiverOptions options, const Tuning& tuning)
    : BoundTarget(std::move(options), pool_), tuning_(tuning), pool_(pool_threads(options_.threads), "ds-parts") {}

PartsReceiver::~PartsReceiver() {
  drop_unfinished();
  bringing_.clear();
  members_.clear();  // their targets name the real one
  joint_.reset();
  target_.reset();  // it uses the pool
}

// ---- the target ----------------------------------------------------------------------------------------------------

Status PartsReceiver::bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) {
  DS_ASSIGN(const TileSet wanted, TileSet::of(*layout_, slices).with_context("bind"));
  if (!divide_tiles(wanted)) {  // who was away at the beginning may be there now
    DS_TRY(connect_missing(CallContext(call)).with_context("bind"));
    DS_TRY(divide_tiles(wanted).with_context("bind"));
  }
  return BoundTarget::bind(std::move(target), slices, call);
}

/// The target before is gone: nothing of the members may name it any more.
Status PartsReceiver::target_bound(const CallContext& /*until*/) {
  joint_ = std::make_unique<JointUpdate>(*target_);
  scrubs_ = 0;
  return share_out();
}

void PartsReceiver::discard_full() {
  for (Member& member : members_) {
    member.staged.reset();
    if (member.receiver != nullptr) member.receiver->drop_unfinished();
  }
  if (joint_ != nullptr) joint_->discard_full();
}

void PartsReceiver::full_is_committed() {
  joint_->full_is_committed();
}

void PartsReceiver::note_standing(const Error* failure) {
  for (Member* member : needed()) {
    member->target->look_at_version();
    member->receiver->note_standing(failure);
  }
}

// ---- questions -----------------------------------------------------------------------------------------------------

Result<bool> PartsReceiver::is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call) {
  if (staged_ == nullptr || staged_ != &staged) {
    return Error(Errc::invalid_argument, "is_current: this update was overtaken by a later pull");
  }
  for (Member* member : needed()) {
    auto means = member->receiver->means({staged.report().version.id, member->staged_root}, want, call);
    if (!means) return about(*member, std::move(means).error()).with_context("is_current");
    if (!*means) return false;
  }
  return true;
}

void PartsReceiver::note_served(const Status& served) {
  for (Member* member : needed()) member->receiver->note_served(served);
}

Lag PartsStatus::lag(const CallContext& until) const {
  const std::vector<Member> members = this->members();
  std::vector<Lag> lags(members.size());
  at_once(members.size(), until, [&](std::size_t i, const CallContext& each) {
    lags[i] = members[i].status->lag(each);
    return true;
  });
  Lag worst;
  worst.last_error = members.empty() ? "no target is bound" : "";
  bool first = true;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Lag& lag = lags[i];
    if (!lag.last_error.empty()) lag.last_error = members[i].name + ": " + lag.last_error;
    const auto behind = [](const Lag& l) { return l.versions.value_or(std::numeric_limits<std::uint64_t>::max()); };
    const bool worse = behind(lag) > behind(worst) || (behind(lag) == behind(worst) && worst.last_error.empty());
    if (std::exchange(first, false) || worse) worst = std::move(lag);
  }
  return worst;
}

std::optional<Unserved> PartsStatus::unserved() const {
  for (const Member& member : members()) {
    if (auto unserved = member.status->unserved()) return unserved;
  }
  return std::nullopt;
}

std::string PartsStatus::last_error() const {
  for (const Member& member : members()) {
    if (const std::string error = member.status->last_error(); !error.empty()) return member.name + ": " + error;
  }
  return {};
}

std::pair<std::uint64_t, std::uint64_t> PartsReceiver::progress() const {
  std::pair<std::uint64_t, std::uint64_t> sum{0, 0};
  const std::lock_guard lock(bringing_mutex_);
  for (const ReceiverImpl* const receiver : bringing_) {
    const auto [done, all] = receiver->progress();
    sum.first += done;
    sum.second += all;
  }
  return sum;
}

// ---- repair --------------------------------------------------------------------------------------------------------

Result<RepairReport> PartsReceiver::repair(std::span<const std::uint64_t> tiles, const CallOptions& call) {
  const auto start = std::chrono::steady_clock::now();
  if (target_ == nullptr) return Error(Errc::invalid_argument, "repair: no target is bound");
  const TargetState* const committed = target_->committed();
  if (committed == nullptr) return Error(Errc::not_found, "repair: nothing is committed that could be repaired");
  std::map<Member*, std::vector<std::uint64_t>> by_member;
  for (const std::uint64_t tile : tiles) {
    if (tile >= layout_->tile_count()) {
      return Error(Errc::out_of_range, "repair: tile " + std::to_string(tile) + " of " +
                                           std::to_string(layout_->tile_count()) + " is to be repaired");
    }
    Member* found = nullptr;
    for (Member* member : needed()) {
      const auto there = member->map->tile_in_part(tile);
      if (!there || !member->target->kept()->contains(*there)) continue;
      by_member[found = member].push_back(*there);
      break;
    }
    if (found == nullptr) {
      return Error(Errc::invalid_argument, "repair: " + describe_tile(*layout_, tile) + " is not kept by the target");
    }
  }
  RepairReport report;
  report.version = committed->version;
  joint_->begin(false);
  for (auto& [member, list] : by_member) {
    member->target->look_at_committed();
    auto repaired = member->receiver->repair(list, call);
    if (!repaired) {
      if (repaired.error().code() != Errc::unsupported) invalidated_ = target_->committed() != nullptr;
      return about(*member, std::move(repaired).error());
    }
    report.tiles += repaired->tiles;
    report.bytes += repaired->bytes;
    report.fetched += repaired->fetched;
    report.wire_bytes += repaired->wire_bytes;
    report.metadata_bytes += repaired->metadata_bytes;
  }
  if (invalidated_) {
    DS_ASSIGN(const auto others, deltasync::attest(*target_, tiles_, call).with_context("repair"));
    invalidated_ = !others.empty();
  }
  report.total_s = seconds_since(start);
  return report;
}

}  // namespace deltasync::receiver
