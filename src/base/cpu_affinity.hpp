// Where threads run: confining the calling thread to a list of CPUs. Memory follows by itself, since Linux takes a page
// from the node of the thread that touches it first; all else is for numactl (capacity.md).
#pragma once

#include <string>

#include "base/cpu_list.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// Where the calling thread may run.
Result<CpuList> allowed_cpus();

/// From now on the calling thread, and those that it starts, run on these only. 0 or an errno.
int run_on(const CpuList& cpus);

/// The CPUs of a list, if all are there and the calling thread may run on them; else invalid_argument, which names the
/// first that is not.
Result<CpuList> usable_cores(const std::string& list);

/// Confines the calling thread, and those that it starts from now on, to the cores of such a list; an empty one leaves
/// all as it is.
Status stay_on_cores(const std::string& list);

}  // namespace deltasync
