#include "receiver/control/routes.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/label.hpp"

namespace deltasync::control {
namespace {

constexpr int kDepthMax = 32;  ///< of a body

int hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

std::string decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hex(text[i + 1]) >= 0 && hex(text[i + 2]) >= 0) {
      out += static_cast<char>(hex(text[i + 1]) * 16 + hex(text[i + 2]));
      i += 2;
    } else {
      out += text[i] == '+' ? ' ' : text[i];
    }
  }
  return out;
}

Error wrong_type(const char* name, const char* type) {
  return {Errc::invalid_argument, std::string("'") + name + "' in the body is no " + type};
}

/// As much of vLLM's own configuration as trl's clients look at. Its engines for weight transfer are NCCL's and the
/// like to them, of which there is none here.
nlohmann::json vllm_config(const ControlOptions& options) {
  return {{"model_config", {{"model", options.model}}},
          {"parallel_config",
           {{"tensor_parallel_size", options.world_size / options.pp_size},
            {"pipeline_parallel_size", options.pp_size},
            {"data_parallel_size", 1}}},
          {"lora_config", nullptr},
          {"weight_transfer_config", nullptr}};
}

}  // namespace

Result<Ask> parse_ask(const net::HttpQuestion& question) {
  Ask ask;
  ask.client = question.client;
  const std::size_t mark = question.target.find('?');
  std::string_view rest = mark == std::string_view::npos ? std::string_view() : question.target.substr(mark + 1);
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    const std::size_t equals = std::min(pair.find('='), pair.size());
    ask.query.emplace(decoded(pair.substr(0, equals)), decoded(pair.substr(std::min(pair.size(), equals + 1))));
  }
  if (question.body.find_first_not_of(" \t\r\n") == std::string_view::npos) return ask;
  bool too_deep = false;
  const auto bounded = [&too_deep](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    too_deep = too_deep || depth > kDepthMax;
    return depth <= kDepthMax;
  };
  auto body = nlohmann::json::parse(question.body, bounded, false);
  if (too_deep) return Error(Errc::invalid_argument, "the body is nested too deeply");
  if (body.is_discarded() || !(body.is_object() || body.is_null())) {
    return Error(Errc::invalid_argument, "the body is no JSON object");
  }
  if (body.is_object()) ask.body = std::move(body);
  return ask;
}

std::string_view Ask::parameter(std::string_view name) const {
  const auto found = query.find(name);
  return found == query.end() ? std::string_view() : std::string_view(found->second);
}

std::vector<std::string> Ask::list(std::string_view name) const {
  std::vector<std::string> out;
  const auto [first, last] = query.equal_range(name);
  for (auto at = first; at != last; ++at) {
    std::string_view rest = at->second;
    while (!rest.empty()) {
      const std::string_view one = rest.substr(0, rest.find(','));
      if (!one.empty()) out.emplace_back(one);
      rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    }
  }
  return out;
}

/// In the words that FastAPI takes.
Result<bool> Ask::flag(std::string_view name, bool otherwise) const {
  std::string text(parameter(name));
  if (text.empty()) return otherwise;
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  for (const std::string_view yes : {"true", "1", "yes", "on", "t", "y"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"false", "0", "no", "off", "f", "n"}) {
    if (text == no) return false;
  }
  return Error(Errc::invalid_argument, "'" + std::string(name) + "' is true or false, not '" + text + "'");
}

Result<std::optional<std::string>> Ask::text(const char* name) const {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return std::optional<std::string>();
  if (found->is_number_integer()) return std::optional<std::string>(found->dump());
  if (!found->is_string()) return wrong_type(name, "text");
  return std::optional<std::string>(found->get<std::string>());
}

Result<std::optional<std::string>> Ask::label(const char* name) const {
  DS_ASSIGN(std::optional<std::string> label, text(name));
  if (label && label->empty()) label.reset();
  if (label) DS_TRY(check_label(*label).with_context(name));
  return label;
}

Result<bool> Ask::boolean(const char* name, bool otherwise) const {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  if (!found->is_boolean()) return wrong_type(name, "boolean");
  return found->get<bool>();
}

Result<std::vector<std::string>> Ask::texts(const char* name) const {
  std::vector<std::string> out;
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return out;
  if (!found->is_array()) return wrong_type(name, "list");
  for (const auto& one : *found) {
    if (!one.is_string()) return wrong_type(name, "list of texts");
    out.push_back(one.get<std::string>());
  }
  return out;
}

net::HttpPage page_of(unsigned status, const nlohmann::json& body) {
  return {status, kJson, body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"};
}

unsigned status_of(const Error& error) {
  switch (error.code()) {
    case Errc::invalid_argument: return 400;
    // What no later try repairs is no 5xx, which clients send again.
    case Errc::version_conflict:
    case Errc::gone:
    case Errc::layout_mismatch: return 409;
    case Errc::unsupported: return 501;
    case Errc::cancelled: return 503;
    case Errc::timed_out: return error.message().starts_with("busy") ? 503 : 504;
    default: return 500;
  }
}

Result<MemorySet> memory_of(const std::vector<std::string>& tags, std::span<const Tag> known) {
  MemorySet memory;
  std::string names;
  for (const Tag& tag : known) {
    names += (names.empty() ? "" : ", ") + std::string(tag.name);
    if (tags.empty()) memory.insert(tag.memory);
  }
  for (const std::string& name : tags) {
    const auto found = std::find_if(known.begin(), known.end(), [&](const Tag& tag) { return tag.name == name; });
    if (found == known.end()) {
      return Error(Errc::invalid_argument, "Unsupported tag " + name + ", expected one of " + names);
    }
    memory.insert(found->memory);
  }
  return memory;
}

Result<std::optional<std::chrono::nanoseconds>> limit_of(const Ask& ask) {
  const std::string text(ask.parameter("timeout"));
  std::optional<std::chrono::nanoseconds> limit;
  if (text.empty()) return limit;
  char* end = nullptr;
  const double seconds = std::strtod(text.c_str(), &end);
  if (*end != '\0' || !(seconds >= 0 && seconds < 1e6)) {
    return Error(Errc::invalid_argument, "timeout=" + text + " is no number of seconds");
  }
  limit = std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
  return limit;
}

std::optional<PauseMode> mode_of(std::string_view text) {
  if (text == "abort") return PauseMode::abort;
  if (text == "wait") return PauseMode::wait;
  if (text == "keep") return PauseMode::keep;
  return std::nullopt;
}

net::HttpPage server_info(Desk& desk, const Ask&) {
  const ControlOptions& options = desk.options;
  nlohmann::json page = {{"model", options.model},
                         {"world_size", options.world_size},
                         {"weight_transfer_config", {{"backend", "deltasync"}}},
                         {"tp_size", options.world_size / options.pp_size},
                         {"pp_size", options.pp_size},
                         {"ep_size", options.ep_size},
                         {"dp_size", 1},
                         {"num_gpus", options.world_size},
                         {"disaggregation_mode", nullptr},
                         {"enable_memory_saver", false},
                         {"vllm_config", vllm_config(options)},
                         {"weight_version", desk.service.standing().label}};
  page.merge_patch(desk.engine_info);
  return page_of(200, page);
}

nlohmann::json live_weights(const Desk& desk) {
  const Standing now = desk.service.standing();
  return {{"weight_version", now.label}, {"cache_salt", now.cache_salt}};
}

net::HttpPage name_version(Desk& desk, const Ask& ask) {
  const auto label = ask.label("new_version");
  Status named = label ? Status() : Status(label.error());
  if (named && !*label) named = Error(Errc::invalid_argument, "no new_version in the body");
  if (named) named = desk.service.rename(**label);
  if (!named) {
    const std::string& why = named.error().message();
    return page_of(status_of(named.error()), {{"success", false}, {"message", why}, {"error", why}});
  }
  return page_of(200,
                 {{"success", true}, {"message", "Weight version updated to " + **label}, {"new_version", **label}});
}

net::HttpPage lora_page(Desk&, const Ask&) {
  const std::string why =
      "no adapters are taken: publish merged weights, or an adapter as a version of its own "
      "(deltasync.adapters.lora)";
  return page_of(501, {{"success", false}, {"message", why}, {"error", why}});
}

bool has_weight_files(const std::string& directory) {
  std::error_code failed;
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator at(directory, failed); !failed && at != end; at.increment(failed)) {
    if (at->path().extension() == ".safetensors") return true;
  }
  return false;
}

PauseMode brief_pause(const Desk& desk) {
  return desk.engine.can_hold() ? PauseMode::keep : PauseMode::wait;
}

}  // namespace deltasync::control
