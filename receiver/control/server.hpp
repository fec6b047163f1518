// The control service as HTTP clients see it.
#pragma once

#include <memory>

#include "deltasync/control.hpp"
#include "receiver/control/weights.hpp"

namespace deltasync::control {

class StoppableServer : public ControlServer {
 public:
  /// Calls end as soon as the engine lets them; later ones fail. Any thread.
  virtual void stop() = 0;
  /// Stops the engine where its weights have become those of no version: for who learns of it beside the calls. Not
  /// beside the destructor.
  virtual Status check() = 0;
  /// Whether this thread carries out a client's call: a hook of the engine or the weights, which must not destroy the
  /// server, since that waits for the call.
  virtual bool in_hook() const = 0;
};

/// As ControlServer::start(), with weights of any kind.
Result<std::unique_ptr<StoppableServer>> start_server(ControlOptions options, RolloutEngine& engine,
                                                      std::unique_ptr<EngineWeights> weights);

}  // namespace deltasync::control
