#include "base/numa_placement.hpp"

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

Result<NumaPlacementPtr> NumaPlacement::make(const NumaPlacementRequest& request, NumaSystem& system) {
  if (request.numa_node == "off") return NumaPlacementPtr();
  const std::vector<NumaNode> nodes = system.nodes();
  CpuList cpus;
  if (request.cores.empty()) {
    DS_ASSIGN(cpus, system.allowed_cpus());
  } else {
    DS_ASSIGN(cpus, usable_cores(request.cores, system));
  }
  std::vector<Node> usable;
  if (request.numa_node == "auto") {
    for (const NumaNode& node : nodes) {
      if (!node.has_memory || !node.memory_allowed) continue;
      if (CpuList own = in_both(node.cpus, cpus); !own.empty()) usable.push_back({node.id, std::move(own)});
    }
    if (usable.size() < 2) return NumaPlacementPtr();
  } else {
    DS_ASSIGN(const NumaNode* const node, named_node(request.numa_node, nodes, cpus));
    usable.push_back({node->id, in_both(node->cpus, cpus)});
    const bool only = std::all_of(nodes.begin(), nodes.end(), [&](const NumaNode& other) {
      return other.id == node->id || !other.has_memory || !other.memory_allowed;
    });
    if (only && usable.front().cpus == cpus) return NumaPlacementPtr();  // it cannot be otherwise
  }
  return NumaPlacementPtr(new NumaPlacement(std::move(usable), system));
}

std::optional<unsigned> NumaPlacement::node_of_page(const std::byte* at) const {
  const auto id = system_.node_of_page(at);
  if (!id) return std::nullopt;
  for (unsigned node = 0; node < node_count(); ++node) {
    if (nodes_[node].id == *id) return node;
  }
  return std::nullopt;
}

/// Each worker goes where, with it, there are the fewest for a CPU.
unsigned NumaPlacement::node_of_worker(unsigned worker) const {
  std::vector<std::size_t> workers(nodes_.size(), 0);
  std::size_t node = 0;
  for (unsigned i = 0; i <= worker; ++i) {
    node = 0;
    for (std::size_t h = 1; h < nodes_.size(); ++h) {
      if ((workers[h] + 1) * nodes_[node].cpus.size() < (workers[node] + 1) * nodes_[h].cpus.size()) node = h;
    }
    ++workers[node];
  }
  return static_cast<unsigned>(node);
}

void NumaPlacement::note_refused(std::atomic<bool>& said, const char* what, const Node& node, int error) const {
  if (error == 0 || said.exchange(true)) return;
  log::warn("numa_placement_refused what={} node={} error=\"{}\"", what, node.id,
            std::generic_category().message(error));
}

void NumaPlacement::enter(unsigned node) const {
  note_refused(said_cpus_, "threads", nodes_[node], system_.run_on(nodes_[node].cpus));
}

void NumaPlacement::prefer_memory_of(unsigned node) const {
  note_refused(said_memory_, "memory", nodes_[node], system_.prefer_memory_of(nodes_[node].id));
}

CpuList NumaPlacement::node_ids() const {
  CpuList ids;
  for (const Node& node : nodes_) ids.push_back(node.id);
  return ids;
}

ThreadNodes thread_nodes(const NumaPlacementPtr& numa_placement, unsigned threads) {
  ThreadNodes nodes;
  if (!numa_placement) return nodes;
  for (unsigned worker = 0; worker < threads; ++worker)
    nodes.of_worker.push_back(numa_placement->node_of_worker(worker));
  nodes.enter = [numa_placement](std::uint32_t node) { numa_placement->enter(node); };
  return nodes;
}

}  // namespace deltasync
