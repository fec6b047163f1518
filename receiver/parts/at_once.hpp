// Questions to all members at the same time.
#pragma once

#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "base/call_context.hpp"

namespace deltasync::receiver {

/// Runs call(i) for each index on a thread of its own; a stop of `until`, or a call that returns false, stops the
/// others.
template <class Call>
void at_once(std::size_t count, const CallContext& until, Call&& call) {
  std::stop_source stop;
  const std::stop_callback passed_on(until.stop(), [&stop] { stop.request_stop(); });
  const CallContext each(until.deadline(), stop.get_token());
  const auto one = [&](std::size_t i) {
    if (!call(i, each)) stop.request_stop();
  };
  std::vector<std::jthread> threads;  // last: they use all of these until they are joined
  std::size_t next = 1;
  try {
    for (; next < count; ++next) threads.emplace_back([&one, i = next] { one(i); });
  } catch (const std::system_error&) {
    for (; next < count; ++next) one(next);  // no more threads to be had: one after the other
  }
  if (count != 0) one(0);
}

}  // namespace deltasync::receiver
