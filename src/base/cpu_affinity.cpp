#include "base/cpu_affinity.hpp"

#include <sched.h>

#include <cerrno>
#include <memory>

namespace deltasync {
namespace {

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

Result<CpuList> allowed_cpus() {
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

int run_on(const CpuList& cpus) {
  const CpuSet set = empty_set();
  if (!set) return ENOMEM;
  for (const unsigned cpu : cpus) CPU_SET_S(cpu, kSetBytes, set.get());
  return ::sched_setaffinity(0, kSetBytes, set.get()) == 0 ? 0 : errno;
}

Result<CpuList> usable_cores(const std::string& list) {
  DS_ASSIGN(CpuList cores, parse_cpu_list(list));
  DS_ASSIGN(const CpuList allowed, allowed_cpus());
  for (const unsigned core : cores) {
    if (contains(allowed, core)) continue;
    return Error(Errc::invalid_argument, "core " + std::to_string(core) +
                                             " is not there, or not open to this process, which may run on " +
                                             to_string(allowed));
  }
  return cores;
}

Status stay_on_cores(const std::string& list) {
  if (list.empty()) return {};
  DS_ASSIGN(const CpuList cores, usable_cores(list));
  if (const int error = run_on(cores); error != 0) return Error::from_errno("run on cores " + list, error);
  return {};
}

}  // namespace deltasync
