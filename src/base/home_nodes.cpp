#include "base/home_nodes.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "base/log.hpp"

namespace deltasync {
namespace {

std::string ids_of(const std::vector<NumaNode>& nodes) {
  CpuList ids;
  for (const NumaNode& node : nodes) ids.push_back(node.id);
  return to_string(ids);
}

/// The node that a user named.
Result<const NumaNode*> named_node(const std::string& text, const std::vector<NumaNode>& nodes, const CpuList& cpus) {
  unsigned id = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, id);
  if (text.empty() || parsed.ec != std::errc() || parsed.ptr != end) {
    return Error(Errc::invalid_argument, "'" + text + "' is no node's number, nor auto or off");
  }
  const auto refuse = [&](const std::string& why) {
    return Error(Errc::invalid_argument, "memory node " + text + " " + why);
  };
  const auto found = std::find_if(nodes.begin(), nodes.end(), [&](const NumaNode& node) { return node.id == id; });
  if (found == nodes.end()) return refuse("is not there (there are " + ids_of(nodes) + ")");
  if (!found->has_memory) return refuse("has no memory");
  if (!found->memory_allowed) return refuse("is not open to this process (its cpuset leaves it out)");
  if (in_both(found->cpus, cpus).empty()) {
    return refuse("has no core that this process may run on (it has " +
                  (found->cpus.empty() ? std::string("none") : to_string(found->cpus)) + ", the process " +
                  to_string(cpus) + ")");
  }
  return &*found;
}

}  // namespace

Result<CpuList> usable_cores(const std::string& list, NumaSystem& system) {
  DS_ASSIGN(CpuList cores, parse_cpu_list(list));
  DS_ASSIGN(const CpuList allowed, system.allowed_cpus());
  for (const unsigned core : cores) {
    if (contains(allowed, core)) continue;
    return Error(Errc::invalid_argument, "core " + std::to_string(core) +
                                             " is not there, or not open to this process, which may run on " +
                                             to_string(allowed));
  }
  return cores;
}

Status stay_on_cores(const std::string& list, NumaSystem& system) {
  if (list.empty()) return {};
  DS_ASSIGN(const CpuList cores, usable_cores(list, system));
  if (const int error = system.run_on(cores); error != 0) return Error::from_errno("run on cores " + list, error);
  return {};
}

Result<HomeNodesPtr> HomeNodes::make(const HomeNodesRequest& request, NumaSystem& system) {
  if (request.numa_node == "off") return HomeNodesPtr();
  const std::vector<NumaNode> nodes = system.nodes();
  CpuList cpus;
  if (request.cores.empty()) {
    DS_ASSIGN(cpus, system.allowed_cpus());
  } else {
    DS_ASSIGN(cpus, usable_cores(request.cores, system));
  }
  std::vector<Home> homes;
  if (request.numa_node == "auto") {
    for (const NumaNode& node : nodes) {
      if (!node.has_memory || !node.memory_allowed) continue;
      if (CpuList own = in_both(node.cpus, cpus); !own.empty()) homes.push_back({node.id, std::move(own)});
    }
    if (homes.size() < 2) return HomeNodesPtr();
  } else {
    DS_ASSIGN(const NumaNode* const node, named_node(request.numa_node, nodes, cpus));
    homes.push_back({node->id, in_both(node->cpus, cpus)});
    const bool only = std::all_of(nodes.begin(), nodes.end(), [&](const NumaNode& other) {
      return other.id == node->id || !other.has_memory || !other.memory_allowed;
    });
    if (only && homes.front().cpus == cpus) return HomeNodesPtr();  // it cannot be otherwise
  }
  return HomeNodesPtr(new HomeNodes(std::move(homes), system));
}

std::optional<unsigned> HomeNodes::home_of_page(const std::byte* at) const {
  const auto node = system_.node_of_page(at);
  if (!node) return std::nullopt;
  for (unsigned home = 0; home < homes(); ++home) {
    if (homes_[home].node == *node) return home;
  }
  return std::nullopt;
}

/// Each worker goes where, with it, there are the fewest for a CPU.
unsigned HomeNodes::home_of_worker(unsigned worker) const {
  std::vector<std::size_t> workers(homes_.size(), 0);
  std::size_t home = 0;
  for (unsigned i = 0; i <= worker; ++i) {
    home = 0;
    for (std::size_t h = 1; h < homes_.size(); ++h) {
      if ((workers[h] + 1) * homes_[home].cpus.size() < (workers[home] + 1) * homes_[h].cpus.size()) home = h;
    }
    ++workers[home];
  }
  return static_cast<unsigned>(home);
}

void HomeNodes::note_refused(std::atomic<bool>& said, const char* what, const Home& home, int error) const {
  if (error == 0 || said.exchange(true)) return;
  log::warn("home_nodes_refused what={} node={} error=\"{}\"", what, home.node, std::generic_category().message(error));
}

void HomeNodes::enter(unsigned home) const {
  note_refused(said_cpus_, "threads", homes_[home], system_.run_on(homes_[home].cpus));
}

void HomeNodes::prefer_memory_of(unsigned home) const {
  note_refused(said_memory_, "memory", homes_[home], system_.prefer_memory_of(homes_[home].node));
}

CpuList HomeNodes::nodes() const {
  CpuList nodes;
  for (const Home& home : homes_) nodes.push_back(home.node);
  return nodes;
}

ThreadHomes thread_homes(const HomeNodesPtr& home_nodes, unsigned threads) {
  ThreadHomes homes;
  if (!home_nodes) return homes;
  for (unsigned worker = 0; worker < threads; ++worker) homes.of_worker.push_back(home_nodes->home_of_worker(worker));
  homes.enter = [home_nodes](std::uint32_t home) { home_nodes->enter(home); };
  return homes;
}

}  // namespace deltasync
