#include "agent/http/health.hpp"

#include <nlohmann/json.hpp>

#include "delta/geometry.hpp"

namespace deltasync::agent {
namespace {

using nlohmann::json;

constexpr std::size_t kTilesNamedMax = 16;

net::HttpPage unavailable(const json& why) {
  return {503, "application/json", why.dump(2, ' ', false, json::error_handler_t::replace) + "\n"};
}

}  // namespace

net::HttpPage health_page(const AgentParts& parts) {
  const ServedPtr served = parts.core.versions().snapshot()->served;
  const std::vector<std::uint64_t> damaged = served ? served->damaged_tiles() : std::vector<std::uint64_t>();
  if (damaged.empty()) return {200, "text/plain; charset=utf-8", "ok\n"};
  json named = json::array();
  for (const std::uint64_t tile : damaged) {
    if (named.size() == kTilesNamedMax) break;
    named.push_back(delta::tile_name(*served->generation->layout, tile));
  }
  return unavailable(
      {{"status", "damaged"},
       {"version", to_string(served->version)},
       {"tiles_damaged", damaged.size()},
       {"tiles", std::move(named)},
       {"remedy", served->relayed
                      ? "bytes of this version are not those that the relay brought; nobody gets it "
                        "whole, and the next version replaces them. Look for stray writes, or for "
                        "failing memory"
                      : "bytes of this version are not those that were offloaded, and are served as they are: the next "
                        "version replaces them. Look for stray writes of the trainer, or for failing memory"}});
}

net::HttpPage ready_page(const AgentParts& parts) {
  if (const auto cut_off = parts.core.origin().cut_off()) {
    return unavailable({{"status", "not ready"}, {"reason", "no newer version comes: " + cut_off->why}});
  }
  if (parts.core.versions().snapshot()->served) return {200, "text/plain; charset=utf-8", "ready\n"};
  return unavailable({{"status", "not ready"}, {"reason", "no version is served yet"}});
}

}  // namespace deltasync::agent
