// What GET /healthz and /readyz answer.
#pragma once

#include "agent/http/status.hpp"
#include "net/http_server.hpp"

namespace deltasync::agent {

/// 200 "ok", or 503 and JSON that names the tiles if what is served is damaged: its bytes are not those that were
/// offloaded. That ends with the next version.
net::HttpPage health_page(const AgentParts& parts);
/// 200 "ready" as soon as there is a version to be pulled, else 503.
net::HttpPage ready_page(const AgentParts& parts);

}  // namespace deltasync::agent
