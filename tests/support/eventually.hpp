// Waiting for what comes by itself, on a machine that may be busy.
#pragma once

#include <chrono>
#include <thread>

#include "base/deadline.hpp"

namespace deltasync::test {

/// Looks again and again until `done()`, for a minute at most; the last look decides.
template <class F>
bool eventually(const F& done) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));  // no wait of a test that passes comes near it
  while (!deadline.passed()) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return done();
}

}  // namespace deltasync::test
