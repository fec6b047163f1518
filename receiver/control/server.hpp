// The control service as HTTP clients see it.
#pragma once

#include <memory>

#include "deltasync/control.hpp"
#include "receiver/control/weights.hpp"

namespace deltasync::control {

/// As ControlServer::start(), with weights of any kind.
Result<std::unique_ptr<ControlServer>> start_server(ControlOptions options, RolloutEngine& engine,
                                                    std::unique_ptr<EngineWeights> weights);

}  // namespace deltasync::control
