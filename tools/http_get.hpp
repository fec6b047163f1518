// One GET over plain HTTP with a deadline: how `deltasync inspect` and `trace` ask a live agent.
#pragma once

#include <string>

#include "deltasync/deadline.hpp"
#include "deltasync/result.hpp"
#include "net/endpoint.hpp"

namespace deltasync::tools {

/// The body of a 200 answer of at most 256 MiB. `protocol` for anything else; the message has the status and the first
/// line of the body.
Result<std::string> http_get(const net::Endpoint& endpoint, const std::string& target, Deadline deadline);

}  // namespace deltasync::tools
