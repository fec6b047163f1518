// Calls of what users have written. No exception passes: it is an error that names the call.
#pragma once

#include <exception>
#include <string>

#include "deltasync/result.hpp"

namespace deltasync::commit {

/// What `hook` returns; internal, "NAME threw: …", if it throws.
template <class F>
auto call_hook(const char* name, const F& hook) -> decltype(hook()) {
  try {
    return hook();
  } catch (const std::exception& e) {
    return Error(Errc::internal, std::string(name) + " threw: " + e.what());
  } catch (...) {
    return Error(Errc::internal, std::string(name) + " threw something that is no std::exception");
  }
}

}  // namespace deltasync::commit
