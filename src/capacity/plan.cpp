#include "capacity/plan.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "capacity/fluid.hpp"

namespace deltasync::capacity {
namespace {

constexpr double kRoundTrips = 4;     ///< of a pull: told of the version, plan, first and last request
constexpr double kFrameHeader = 38;   ///< of Ethernet, the gap between frames included
constexpr double kPacketHeader = 52;  ///< of IP and TCP
// Bytes of memory that move for a byte of the version.
constexpr double kCopyMoves = 2;
constexpr double kDiffMoves = 2;
constexpr double kReceiveMoves = 2;

/// Always the same numbers for a seed. From 0 to 1.
double random_part(std::uint64_t seed, std::uint64_t number) {
  std::uint64_t z = seed * 0x9E3779B97F4A7C15ULL + (number + 1) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

struct Host {
  ResourceId up = 0;
  ResourceId down = 0;
  ResourceId processor = 0;
  ResourceId memory = 0;
  WorkId served = kNobody;  ///< when it ends, this host serves the version
  // A relay that hands on what comes to it, to those that take all of the model: from when on, and until when.
  WorkId streams_from = kNobody;
  WorkId streams_until = kNobody;
};

class Fleet {
 public:
  Fleet(const Topology& topology, const Rates& rates, std::uint64_t seed)
      : topology_(topology), rates_(rates), seed_(seed) {
    const Model& model = topology_.model;
    const double bits = model.bits_per_change > 0 ? model.bits_per_change : rates_.bits_per_change;
    const double delta = model.parameters * model.changed * bits / 8;
    full_ = model.changed >= 1 || delta >= model.bytes();
    wire_bytes_ = full_ ? model.bytes() : delta;
    framing_ = (topology_.mtu + kFrameHeader) / (topology_.mtu - kPacketHeader);
  }

  Prediction run() {
    add_shared();
    for (std::uint32_t g = 0; g < topology_.groups.size(); ++g) add_group(g);
    fluid_.run();
    return result();
  }

 private:
  // ---- resources ----

  ResourceId resource(double per_s, std::string label) {
    labels_.push_back(std::move(label));
    return fluid_.add_resource(per_s > 0 ? per_s : kUnlimited);
  }

  void add_shared() {
    for (const auto& [name, rate] : topology_.links) links_[name] = resource(rate, "the link " + name);
    for (const auto& [name, cores] : topology_.processors) processors_[name] = resource(cores, "the processor " + name);
  }

  /// Several hosts are one that has all that they have.
  Host make_host(const Group& group, double hosts = 1) {
    Host host;
    host.up = resource(hosts * group.link, "up links of " + group.name);
    host.down = resource(hosts * group.link, "down links of " + group.name);
    const double cores = hosts * group.cores / (1 + group.slower * random_part(seed_, hosts_made_++));
    host.processor =
        group.processor.empty() ? resource(cores, "processors of " + group.name) : processors_.at(group.processor);
    host.memory = resource(hosts * group.memory_gbps * 1e9, "memory of " + group.name);
    return host;
  }

  // ---- work ----

  std::uint32_t stage(std::string name) {
    const auto found = std::find(stages_.begin(), stages_.end(), name);
    if (found != stages_.end()) return static_cast<std::uint32_t>(found - stages_.begin());
    stages_.push_back(std::move(name));
    return static_cast<std::uint32_t>(stages_.size() - 1);
  }

  /// `cost_s` of a core and `moves` of memory for each of `amount`. Against pulls it has the share of the processor
  /// that one of them has.
  WorkId compute(const Host& host, double amount, double cost_s, double moves, std::uint32_t stage,
                 std::span<const WorkId> after) {
    Work work;
    work.amount = amount;
    work.stage = stage;
    work.uses = {{host.processor, cost_s}, {host.memory, moves}};
    if (cost_s > 0 && rates_.receive_s > 0) work.weight = rates_.receive_s / cost_s;
    return fluid_.add(std::move(work), after);
  }

  void add_group(std::uint32_t g) {
    const Group& group = topology_.groups[g];
    if (g == 0) {
      add_trainers(group);
      return;
    }
    const bool engines = topology_.is_engine(g);
    for (std::uint32_t i = 0; i < group.count; ++i) {
      if (engines) {
        engines_.emplace_back(g, std::vector<WorkId>());
        for (std::uint32_t h = 0; h < group.hosts; ++h) add_engine_host(group, i * group.hosts + h);
      } else {
        hosts_of_[g].push_back(add_relay(group, i));
      }
    }
  }

  /// All trainers do the same at the same time, and every pull takes as much from each. If they are alike, they are
  /// one.
  void add_trainers(const Group& group) {
    const std::uint32_t apart = group.slower > 0 ? group.count : 1;
    const double bytes = topology_.model.bytes() / apart;
    for (std::uint32_t i = 0; i < apart; ++i) {
      Host host = make_host(group, static_cast<double>(group.count) / apart);
      const WorkId offload = compute(host, bytes, rates_.offload_s, kCopyMoves, stage("offload"), {});
      host.served = compute(host, bytes, rates_.diff_s, kDiffMoves, stage("diff"), std::span(&offload, 1));
      hosts_of_[0].push_back(host);
    }
  }

  Host add_relay(const Group& group, std::uint32_t number) {
    Host host = make_host(group);
    const double bytes = topology_.model.bytes();
    const WorkId pull = add_pull(group, host, number, 1);
    const std::vector<Host>& above = hosts_of_.at(group.from);
    if (group.from != 0 || topology_.groups[0].count == 1) {  // parts of several trainers are put together first
      const Host& source = above[number % above.size()];
      host.streams_from = source.streams_from != kNobody ? source.streams_from : source.served;
      host.streams_until = pull;
    }
    // A whole version waits in memory and is copied like an offload.
    const WorkId commit = compute(host, bytes, full_ ? rates_.offload_s : rates_.relay_commit_s, kCopyMoves,
                                  stage("commit by " + group.name), std::span(&pull, 1));
    host.served = compute(host, bytes, full_ ? rates_.diff_s : rates_.relay_diff_s, kDiffMoves,
                          stage("diff by " + group.name), std::span(&commit, 1));
    return host;
  }

  void add_engine_host(const Group& group, std::uint32_t number) {
    const Host host = make_host(group);
    const double share = 1.0 / group.hosts;
    const WorkId pull = add_pull(group, host, number, share);
    const double changes = full_ ? 0 : topology_.model.parameters * topology_.model.changed * share;
    engines_.back().second.push_back(
        compute(host, changes, rates_.commit_s, 0, stage("commit by " + group.name), std::span(&pull, 1)));
  }

  WorkId add_pull(const Group& group, const Host& host, std::uint32_t number, double share) {
    const Group& source = topology_.groups[group.from];
    const std::vector<Host>& all = hosts_of_.at(group.from);
    const auto from = group.from == 0 ? std::span(all) : std::span(all).subspan(number % all.size(), 1);
    Work work;
    work.stage = stage("pull by " + group.name);
    work.amount = wire_bytes_ * share;
    work.delay_s = rates_.pull_s + kRoundTrips * 2 * (group.delay_ms + source.delay_ms) / 1000;
    const double part = 1.0 / static_cast<double>(from.size());
    const bool streams = share == 1 && from.size() == 1 && from.front().streams_from != kNobody;
    std::vector<WorkId> after;
    for (const Host& each : from) {
      after.push_back(streams ? each.streams_from : each.served);
      work.uses.push_back({each.up, part * framing_});
      work.uses.push_back({each.processor, part * rates_.send_s});
      work.uses.push_back({each.memory, part});
    }
    if (!group.through.empty()) work.uses.push_back({links_.at(group.through), framing_});
    work.uses.push_back({host.down, framing_});
    work.uses.push_back({host.processor, receive_s()});
    work.uses.push_back({host.memory, kReceiveMoves});
    const std::uint32_t stage = work.stage;
    const WorkId pull = fluid_.add(std::move(work), after);
    if (!streams) return pull;
    // Not before the source has it all.
    Work last;
    last.stage = stage;
    return fluid_.add(std::move(last), std::array{pull, from.front().streams_until});
  }

  /// Of a core, for each byte on the wire. What is verified of a delta is what changed.
  double receive_s() const {
    if (full_) return rates_.receive_s;
    return rates_.verify_s * topology_.model.parameters * topology_.model.changed / wire_bytes_;
  }

  // ---- what came of it ----

  Prediction result() const {
    Prediction out;
    out.full = full_;
    out.wire_bytes = wire_bytes_;
    WorkId last = kNobody;
    for (const auto& [group, ends] : engines_) {
      const WorkId end = *std::max_element(ends.begin(), ends.end(),
                                           [&](WorkId a, WorkId b) { return fluid_.end_s(a) < fluid_.end_s(b); });
      out.ready_s.push_back(fluid_.end_s(end));
      if (last != kNobody && fluid_.end_s(end) <= fluid_.end_s(last)) continue;
      last = end;
      out.last_group = group;
    }
    std::sort(out.ready_s.begin(), out.ready_s.end());
    const std::vector<PathPart> parts = fluid_.path_to(last);
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      const std::string limit = part->limit == kNobody ? "waiting" : labels_[part->limit];
      const bool same =
          !out.path.empty() && out.path.back().stage == stages_[part->stage] && out.path.back().limit == limit;
      if (!same) out.path.push_back({stages_[part->stage], limit, 0});
      out.path.back().seconds += part->seconds;
    }
    return out;
  }

  const Topology& topology_;
  const Rates& rates_;
  const std::uint64_t seed_;
  bool full_ = false;
  double wire_bytes_ = 0;
  double framing_ = 1;
  Fluid fluid_;
  std::vector<std::string> labels_;  ///< of resources
  std::vector<std::string> stages_;
  std::map<std::string, ResourceId> links_;
  std::map<std::string, ResourceId> processors_;
  std::map<std::uint32_t, std::vector<Host>> hosts_of_;  ///< by group
  std::vector<std::pair<std::uint32_t, std::vector<WorkId>>>
      engines_;  ///< their group, and the end of each host's work
  std::uint64_t hosts_made_ = 0;
};

/// Only a host's kinds of links and processors, and who is in between, change.
Topology with_relays(const Topology& topology, std::uint32_t engines, std::uint32_t count) {
  Topology out = topology;
  Group relays = topology.groups[engines];
  relays.name = "relays of " + relays.name;
  relays.count = count;
  relays.hosts = 1;
  const auto at = topology.relay_groups + 1;
  out.groups.insert(out.groups.begin() + at, std::move(relays));
  out.relay_groups = at;
  Group& behind = out.groups[engines + 1];
  behind.from = at;
  behind.through.clear();
  return out;
}

}  // namespace

double Prediction::until(double part) const {
  const auto wanted = static_cast<std::size_t>(std::ceil(part * static_cast<double>(ready_s.size()) - 1e-9));
  return ready_s[std::clamp<std::size_t>(wanted, 1, ready_s.size()) - 1];
}

PathShare Prediction::bottleneck() const {
  std::vector<PathShare> limits;
  for (const PathShare& part : path) {
    const auto same =
        std::find_if(limits.begin(), limits.end(), [&](const auto& one) { return one.limit == part.limit; });
    if (same == limits.end()) {
      limits.push_back({"", part.limit, part.seconds});
    } else {
      same->seconds += part.seconds;
    }
  }
  const auto most = std::max_element(limits.begin(), limits.end(),
                                     [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
  return most == limits.end() ? PathShare{"", "nothing", 0} : *most;
}

Prediction predict(const Topology& topology, const Rates& rates, std::uint64_t seed) {
  return Fleet(topology, rates, seed).run();
}

std::optional<RelayLevel> add_relay_level(const Topology& topology, const Rates& rates, std::uint64_t seed,
                                          const Prediction& now) {
  const Group& engines = topology.groups[now.last_group];
  std::optional<RelayLevel> best;
  for (std::uint32_t count = 1; count <= engines.count * engines.hosts / 2; count *= 2) {
    Prediction then = predict(with_relays(topology, now.last_group, count), rates, seed);
    if (!best || then.all_s() < best->then.all_s()) best = RelayLevel{engines.name, count, std::move(then)};
  }
  return best;
}

}  // namespace deltasync::capacity
