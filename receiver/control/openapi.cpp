// What /openapi.json says of the routes.
#include <algorithm>
#include <utility>

#include "receiver/control/routes.hpp"

namespace deltasync::control {
namespace {

using nlohmann::json;

json schema_of(std::string_view type) {
  if (type == "texts") return {{"type", "array"}, {"items", {{"type", "string"}}}};
  if (type == "text") return {{"oneOf", {{{"type", "string"}}, {{"type", "integer"}}}}};
  if (type.find('/') == std::string_view::npos) return {{"type", type}};
  json words = json::array();
  while (!type.empty()) {
    const std::string_view word = type.substr(0, type.find('/'));
    words.push_back(word);
    type.remove_prefix(std::min(type.size(), word.size() + 1));
  }
  return {{"type", "string"}, {"enum", words}};
}

/// Of "NAME:TYPE NAME:TYPE".
std::vector<std::pair<std::string, json>> fields_of(std::string_view text) {
  std::vector<std::pair<std::string, json>> fields;
  while (!text.empty()) {
    const std::string_view field = text.substr(0, text.find(' '));
    const std::size_t colon = field.find(':');
    fields.emplace_back(field.substr(0, colon), schema_of(field.substr(colon + 1)));
    text.remove_prefix(std::min(text.size(), field.size() + 1));
  }
  return fields;
}

json operation_of(const Route& route, std::string_view method) {
  json parameters = json::array();
  for (auto& [name, schema] : fields_of(route.query)) {
    parameters.push_back({{"name", name}, {"in", "query"}, {"schema", std::move(schema)}});
  }
  for (const char* header : {kMinVersionHeader, kExactVersionHeader}) {
    parameters.push_back({{"name", header}, {"in", "header"}, {"schema", {{"type", "string"}}}});
  }
  const json content = {{kJson, {{"schema", json::object()}}}, {"text/plain", {{"schema", {{"type", "string"}}}}}};
  json operation = {{"summary", route.summary},
                    {"parameters", std::move(parameters)},
                    {"responses", {{"default", {{"description", "the dialect's own words"}, {"content", content}}}}}};
  if (method == "POST") {
    json properties = json::object();
    for (auto& [name, schema] : fields_of(route.body)) {
      schema["nullable"] = true;
      properties[name] = std::move(schema);
    }
    const json body = {{"type", "object"}, {"properties", std::move(properties)}};
    operation["requestBody"] = {{"content", {{kJson, {{"schema", body}}}}}};
  }
  return operation;
}

}  // namespace

bool has_method(const Route& route, std::string_view method) {
  return route.methods.find(method) != std::string_view::npos;
}

json openapi_of(std::span<const Route* const> routes) {
  json paths = json::object();
  for (const Route* route : routes) {
    json& path = paths[std::string(route->path)];
    if (has_method(*route, "GET")) path["get"] = operation_of(*route, "GET");
    if (has_method(*route, "POST")) path["post"] = operation_of(*route, "POST");
  }
  return {{"openapi", "3.0.3"}, {"info", {{"title", "deltasync rollout control"}, {"version", "1"}}}, {"paths", paths}};
}

}  // namespace deltasync::control
