#include "base/numa.hpp"

#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <sched.h>

#include <cerrno>
#include <climits>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

namespace deltasync {
namespace {

/// libnuma's names for the system calls.
struct Policy {
  long (*set)(int mode, const unsigned long* nodes, unsigned long bits) = nullptr;
  long (*get)(int* mode, unsigned long* nodes, unsigned long bits, void* address, unsigned flags) = nullptr;

  static Policy load() {
    Policy policy;
    void* const library = ::dlopen("libnuma.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed
    if (library == nullptr) return policy;
    policy.set = reinterpret_cast<decltype(policy.set)>(::dlsym(library, "set_mempolicy"));
    policy.get = reinterpret_cast<decltype(policy.get)>(::dlsym(library, "get_mempolicy"));
    return policy;
  }
};

const Policy& policy() {
  static const Policy loaded = Policy::load();
  return loaded;
}

/// The list in a file of one line; nothing if there is no such file. sysfs writes an empty set as an empty line.
std::optional<CpuList> list_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  if (!in || !std::getline(in, line)) return std::nullopt;
  if (line.empty()) return CpuList();
  auto list = parse_cpu_list(line);
  if (!list) return std::nullopt;
  return std::move(*list);
}

/// "Mems_allowed_list:	0-1"
std::optional<CpuList> memory_allowed(const std::filesystem::path& status) {
  constexpr std::string_view kField = "Mems_allowed_list:";
  std::ifstream in(status);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(kField)) continue;
    const std::size_t first = line.find_first_not_of(" \t", kField.size());
    if (first == std::string::npos) return std::nullopt;
    auto list = parse_cpu_list(std::string_view(line).substr(first));
    if (!list) return std::nullopt;
    return std::move(*list);
  }
  return std::nullopt;
}

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, FreeCpuSet>;
const std::size_t kSetBytes = CPU_ALLOC_SIZE(kCpusMax);

CpuSet empty_set() {
  CpuSet set(CPU_ALLOC(kCpusMax));
  if (set) CPU_ZERO_S(kSetBytes, set.get());
  return set;
}

}  // namespace

std::vector<NumaNode> LinuxNuma::nodes() {
  std::vector<NumaNode> nodes;
  const auto online = list_in(files_.nodes / "online");
  if (!online) return nodes;
  const auto with_memory = list_in(files_.nodes / "has_memory");
  const auto allowed = memory_allowed(files_.status);
  for (const unsigned id : *online) {
    auto cpus = list_in(files_.nodes / ("node" + std::to_string(id)) / "cpulist");
    nodes.push_back({id, cpus ? std::move(*cpus) : CpuList(), !with_memory || contains(*with_memory, id),
                     !allowed || contains(*allowed, id)});
  }
  return nodes;
}

Result<CpuList> LinuxNuma::allowed_cpus() {
  const CpuSet set = empty_set();
  if (!set || ::sched_getaffinity(0, kSetBytes, set.get()) != 0) {
    return Error::from_errno("ask where this process may run", set ? errno : ENOMEM);
  }
  CpuList cpus;
  for (unsigned cpu = 0; cpu < kCpusMax; ++cpu) {
    if (CPU_ISSET_S(cpu, kSetBytes, set.get())) cpus.push_back(cpu);
  }
  return cpus;
}

int LinuxNuma::run_on(const CpuList& cpus) {
  const CpuSet set = empty_set();
  if (!set) return ENOMEM;
  for (const unsigned cpu : cpus) CPU_SET_S(cpu, kSetBytes, set.get());
  return ::sched_setaffinity(0, kSetBytes, set.get()) == 0 ? 0 : errno;
}

int LinuxNuma::prefer_memory_of(unsigned node) {
  if (policy().set == nullptr) return ENOSYS;
  constexpr unsigned kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> nodes(node / kBits + 1, 0);
  nodes[node / kBits] = 1UL << (node % kBits);
  // The kernel leaves out the last of the bits that it is told of.
  return policy().set(MPOL_PREFERRED, nodes.data(), nodes.size() * kBits + 1) == 0 ? 0 : errno;
}

std::optional<unsigned> LinuxNuma::node_of_page(const std::byte* at) {
  int node = -1;
  if (policy().get == nullptr) return std::nullopt;
  if (policy().get(&node, nullptr, 0, const_cast<std::byte*>(at), MPOL_F_NODE | MPOL_F_ADDR) != 0) return std::nullopt;
  return node < 0 ? std::nullopt : std::optional<unsigned>(static_cast<unsigned>(node));
}

NumaSystem& linux_numa() {
  static LinuxNuma numa;
  return numa;
}

}  // namespace deltasync
