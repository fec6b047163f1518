// Tells the agent that a relay writes to of a delta while it comes: each frame once it is verified, so that receivers
// of that agent need not wait until the relay has all of it and has committed it.
#pragma once

#include <atomic>
#include <mutex>

#include "deltasync/writer.hpp"
#include "format/wire_report.hpp"

namespace deltasync::relay {

/// Best effort: an agent that does not take it serves the version once it is committed.
class ArrivingDelta {
 public:
  /// Borrowed. It is used by nobody else while came() is called.
  explicit ArrivingDelta(Writer& writer) : writer_(writer) {}

  void begin(const wire::TrainerDelta& delta);
  /// Any thread.
  void came(const wire::TileRange& tiles, ByteSpan frame);
  void give_up() noexcept;

 private:
  Writer& writer_;
  std::mutex mutex_;
  std::atomic<bool> told_{false};  ///< the agent knows of it, and has all that came
};

}  // namespace deltasync::relay
