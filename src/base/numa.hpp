// What Linux says of the machine's memory nodes, and the calls that place threads and pages on them. Real and made up:
// tests assert the calls for machines that they do not have.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "base/cpu_list.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

struct NumaNode {
  unsigned id = 0;
  CpuList cpus;  ///< its own, no matter who may use them; empty for memory without processors
  bool has_memory = false;
  bool memory_allowed = true;  ///< by the cpuset that this process is in
};

/// Any thread. Those that return int return 0 or an errno.
class NumaSystem {
 public:
  virtual ~NumaSystem() = default;

  /// Nodes that are online, in the order of their ids. Empty where the system does not tell.
  virtual std::vector<NumaNode> nodes() = 0;
  /// Where the calling thread may run.
  virtual Result<CpuList> allowed_cpus() = 0;
  /// From now on the calling thread, and those that it starts, run on these only.
  virtual int run_on(const CpuList& cpus) = 0;
  /// From now on new pages for the calling thread come from this node, and from another only if it is full.
  virtual int prefer_memory_of(unsigned node) = 0;
  /// The node of the page at this address, which is mapped; nothing if the system does not tell.
  virtual std::optional<unsigned> node_of_page(const std::byte* at) = 0;
};

/// Where Linux tells of its nodes.
struct NumaFiles {
  std::filesystem::path nodes = "/sys/devices/system/node";
  std::filesystem::path status = "/proc/self/status";
};

/// sched_setaffinity, and libnuma, which is loaded at the first call that needs it: a machine of one node needs none,
/// and what links this library does not depend on it. The nodes themselves are read from sysfs, since libnuma answers
/// nothing at all where a container's filter of system calls refuses memory policies.
class LinuxNuma final : public NumaSystem {
 public:
  explicit LinuxNuma(NumaFiles files = {}) : files_(std::move(files)) {}

  std::vector<NumaNode> nodes() override;
  Result<CpuList> allowed_cpus() override;
  int run_on(const CpuList& cpus) override;
  int prefer_memory_of(unsigned node) override;
  std::optional<unsigned> node_of_page(const std::byte* at) override;

 private:
  const NumaFiles files_;
};

/// The machine that this process runs on.
NumaSystem& linux_numa();

}  // namespace deltasync
