// What GET /metrics answers.
#pragma once

#include <string>

#include "agent/http/status.hpp"

namespace deltasync::agent {

/// In Prometheus' text format: counters and histograms, gauges as of now, and the process's own figures.
std::string metrics_text(const AgentParts& parts);

}  // namespace deltasync::agent
