// The routes that clients of other servers use, each of which is a call of the service.
#pragma once

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/control.hpp"
#include "net/http_server.hpp"
#include "receiver/control/service.hpp"

namespace deltasync::control {

/// A client's question, taken apart. Fields that a route does not know are ignored.
struct Ask {
  std::multimap<std::string, std::string, std::less<>> query;
  nlohmann::json body = nlohmann::json::object();  ///< an object; empty if there was none
  std::string client;                              ///< its IP address; empty: unknown

  /// The first of that name; empty: none.
  std::string_view parameter(std::string_view name) const;
  /// "a,b" or several of that name: each by itself.
  std::vector<std::string> list(std::string_view name) const;
  Result<bool> flag(std::string_view name, bool otherwise) const;
  /// Of the body; nothing if it is not there or null. Errors name a field of another type.
  Result<std::optional<std::string>> text(const char* name) const;
  Result<bool> boolean(const char* name, bool otherwise) const;
  Result<std::vector<std::string>> texts(const char* name) const;
  /// What a version shall be called; nothing if it is empty. Errors name a label that writers could not give either.
  Result<std::optional<std::string>> label(const char* name) const;
};
/// invalid_argument: no JSON object.
Result<Ask> parse_ask(const net::HttpQuestion& question);

/// What routes work with.
struct Desk {
  Service& service;
  RolloutEngine& engine;
  const ControlOptions& options;
  EngineWeights& weights;
  const nlohmann::json engine_info;  ///< what clients are told of the engine besides
  std::mutex mutex;
  bool update_started = false;               ///< protected by mutex, as all below
  std::map<std::string, VersionId> updated;  ///< since then: by Ask::client, what its last update_weights brought
  std::string pulled_directory;              ///< which a client was told has this version
  std::optional<VersionId> pulled;
};

struct Route {
  std::string_view methods;  ///< "GET", "POST" or "GET POST"
  std::string_view path;
  std::string_view summary;
  net::HttpPage (*answer)(Desk& desk, const Ask& ask);
  // What the route looks at of a question: "NAME:TYPE NAME:TYPE". Types are JSON's, "text" (a string or an integer),
  // "texts" (a list of strings), or the words that may stand there, as in "mode:abort/wait/keep".
  std::string_view query = {};
  std::string_view body = {};
};
/// OpenAPI's description of them.
nlohmann::json openapi_of(std::span<const Route* const> routes);

bool has_method(const Route& route, std::string_view method);

std::span<const Route> v1_routes();
std::span<const Route> vllm_routes();
std::span<const Route> sglang_routes();

inline constexpr const char* kJson = "application/json";
net::HttpPage page_of(unsigned status, const nlohmann::json& body);
/// The HTTP status of a call that failed, where a dialect has no words of its own.
unsigned status_of(const Error& error);
struct Tag {
  std::string_view name;
  EngineMemory memory;
};
/// What tags name; all of `known` if there is none. Unknown ones are named.
Result<MemorySet> memory_of(const std::vector<std::string>& tags, std::span<const Tag> known);
/// `timeout` of the query, in seconds; nothing if it is not there.
Result<std::optional<std::chrono::nanoseconds>> limit_of(const Ask& ask);
/// nullopt: there is no such mode.
std::optional<PauseMode> mode_of(std::string_view text);
/// Routes that two dialects have under one path: with what clients of either look for.
net::HttpPage server_info(Desk& desk, const Ask& ask);
net::HttpPage name_version(Desk& desk, const Ask& ask);
net::HttpPage lora_page(Desk& desk, const Ask& ask);
/// Whether there are safetensors files.
bool has_weight_files(const std::string& directory);
/// {"weight_version", "cache_salt"}
nlohmann::json live_weights(const Desk& desk);
/// What an update that finds the engine serving does meanwhile.
PauseMode brief_pause(const Desk& desk);

}  // namespace deltasync::control
