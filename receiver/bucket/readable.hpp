// Waiting for one of several descriptors, by a thread that a stop wakes.
#pragma once

#include <poll.h>

#include <vector>

#include "base/call_context.hpp"
#include "deltasync/result.hpp"

namespace deltasync::receiver {

/// Until one of them has what is asked for; `what` is named by timed_out and cancelled. At a deadline that has passed
/// it looks once.
Status wait_readable(std::vector<pollfd>& fds, const CallContext& until, const char* what);

}  // namespace deltasync::receiver
