// The end of a coroutine that nobody awaits: an exception (memory, descriptors) is said, not swallowed.
#pragma once

#include <exception>

#include "base/log.hpp"

namespace deltasync::net {

/// Completion handler for co_spawn. `what` is a literal.
inline auto log_exception(const char* what) {
  return [what](const std::exception_ptr& thrown) {
    if (!thrown) return;
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& e) {
      log::error("{}_failed error=\"{}\"", what, e.what());
    }
  };
}

}  // namespace deltasync::net
