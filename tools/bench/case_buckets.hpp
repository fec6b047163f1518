// What bench colocated says of a bucket channel.
#pragma once

#include "bench/bench.hpp"

namespace deltasync::bench {

Result<Json> run_buckets(const Options& options);

}  // namespace deltasync::bench
