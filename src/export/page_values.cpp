#include "export/page_values.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::exporting {
namespace {

using Json = nlohmann::json;

constexpr int kSizesDeepMax = 32;  ///< of a size that is made of sizes

/// Python's json has three numbers that JSON has no word for, and writes them into configs: they become null.
std::string without_python_numbers(std::string_view json) {
  std::string out;
  bool in_text = false;
  while (!json.empty()) {
    std::size_t taken = in_text && json.front() == '\\' ? 2 : 1;
    std::string_view put = json.substr(0, taken);
    if (json.front() == '"') in_text = !in_text;
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
      if (in_text || !json.starts_with(word)) continue;
      taken = word.size();
      put = "null";
    }
    out += put;
    json.remove_prefix(std::min(taken, json.size()));
  }
  return out;
}

}  // namespace

Result<Json> parse_config(std::string_view config) {
  Json json = Json::parse(without_python_numbers(config), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Error(Errc::invalid_argument, "config.json: no JSON object");
  return json;
}

PageValues::PageValues(const Family& family, Json config) : family_(family), config_(std::move(config)) {}

Names PageValues::with(const Captures& captures) const {
  return [this, &captures](const std::string& name) -> Value {
    if (const auto there = captures.find(name); there != captures.end()) {
      return std::optional<double>(static_cast<double>(there->second));
    }
    return value(name, 0);
  };
}

Result<bool> PageValues::holds(const std::string& when, const Captures& captures) const {
  if (when.empty()) return true;
  std::string missing;
  DS_ASSIGN(const std::optional<double> value, evaluate(when, with(captures), &missing));
  if (!value) return Error(Errc::invalid_argument, "'" + when + "': config.json has no '" + missing + "'");
  return *value != 0;
}

PageValues::Value PageValues::value(const std::string& name, int depth) const {
  if (const auto known = known_.find(name); known != known_.end()) return known->second;
  const auto size = family_.sizes.find(name);
  if (size == family_.sizes.end()) return of_config(name);
  if (depth > kSizesDeepMax) return Error(Errc::invalid_argument, "size '" + name + "' is made of itself");
  auto made = evaluate(size->second, [&](const std::string& inner) {
    // A size may have the name of the key that it stands for.
    return inner == name ? of_config(inner) : value(inner, depth + 1);
  });
  if (made) known_.emplace(name, *made);
  return made;
}

PageValues::Value PageValues::of_config(const std::string& name) const {
  const Json* node = &config_;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t dot = std::min(name.find('.', at), name.size());
    if ((node->is_string() || node->is_array()) && std::string_view(name).substr(at) == "length") {
      const std::size_t length = node->is_string() ? node->get_ref<const std::string&>().size() : node->size();
      return std::optional<double>(static_cast<double>(length));
    }
    const auto found = node->is_object() ? node->find(name.substr(at, dot - at)) : node->end();
    if (!node->is_object() || found == node->end()) return of_text_model(name);
    node = &*found;
    at = dot + 1;
  }
  if (node->is_boolean()) return std::optional<double>(node->get<bool>() ? 1 : 0);
  if (node->is_number()) return std::optional<double>(node->get<double>());
  if (node->is_null()) return of_text_model(name);
  return Error(Errc::invalid_argument, "config.json: '" + name + "' is to be a number, and is of type '" +
                                           std::string(node->type_name()) + "'");
}

/// The language model of one that also sees or hears has a table of its own.
PageValues::Value PageValues::of_text_model(const std::string& name) const {
  if (name.starts_with("text_config.") || !config_.contains("text_config")) return std::optional<double>();
  return of_config("text_config." + name);
}

}  // namespace deltasync::exporting
