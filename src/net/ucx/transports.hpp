// Which of UCX's transports may carry a channel. UCX falls back in silence: to tcp where a fabric's transport lacks
// something or its driver is not there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync::net::ucx {

/// "rc,cuda" → names; `invalid_argument` if one is empty. None if the list is.
Result<std::vector<std::string>> parse_transports(std::string_view list);
/// By its own name ("rc_mlx5"), the part before "_" ("rc"), or one of UCX's names for several (sm, shm, ib).
bool is_wanted(std::string_view transport, const std::vector<std::string>& wanted);
/// `unsupported`, with the remedy.
Error not_wanted(const std::string& transport, const std::vector<std::string>& wanted);

/// Names that `all` does not have, of a list, are put at its end: "tcp/lo,posix/memory".
void add_names(std::string& all, std::string_view more);

}  // namespace deltasync::net::ucx
