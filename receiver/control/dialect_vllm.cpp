// vLLM's routes for weight updates, and what prime-rl's clients send to them.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <utility>

#include "receiver/control/routes.hpp"

namespace deltasync::control {
namespace vllm {
namespace {

using net::HttpPage;
using nlohmann::json;

constexpr Tag kTags[] = {{"weights", EngineMemory::weights}, {"kv_cache", EngineMemory::kv_cache}};
constexpr std::uint64_t kDeadlineMsMax = 1'000'000'000;
/// The plug-in's (deltasync/engines/vllm_engine.py), and those of the other dialects.
constexpr std::string_view kUpdateInfo[] = {"version", "verify", "deadline_ms", "directory", "verify_checksum"};

HttpPage refused(unsigned status, const std::string& why) {
  return page_of(status, {{"error", why}});
}
HttpPage refused(const Error& error) {
  return refused(status_of(error), error.message());
}

HttpPage told(const Status& done, const json& answer) {
  return done ? page_of(200, answer) : refused(done.error());
}

HttpPage pause(Desk& desk, const Ask& ask) {
  const std::string_view said = ask.parameter("mode");
  const auto mode = mode_of(said.empty() ? "abort" : said);
  if (!mode) return refused(422, "mode is abort, wait or keep, not " + std::string(said));
  const auto resets_caches = ask.flag("clear_cache", true);
  if (!resets_caches) return refused(422, resets_caches.error().message());
  const Call call{.kind = Call::Kind::pause, .mode = *mode, .resets_caches = *resets_caches};
  return told(desk.service.call(call), {{"status", "paused"}});
}

/// The receiver is connected. A trainer that would now wait for its workers in a group of NCCL is told that they will
/// not come.
HttpPage init_transfer(Desk&, const Ask& ask) {
  const auto info = ask.body.find("init_info");
  if (info != ask.body.end() && info->is_object() && info->contains("master_address")) {
    return refused(501, "tensors do not come by NCCL here: publish them (deltasync.adapters.trl)");
  }
  return page_of(200, {{"message", "Weight transfer initialized"}});
}

HttpPage abort_requests(Desk& desk, const Ask& ask) {
  const auto ids = ask.texts("request_ids");
  if (!ids) return refused(ids.error());
  const auto aborted = desk.service.abort(*ids);
  return aborted ? page_of(200, {{"status", "aborted"}, {"aborted", *aborted}}) : refused(aborted.error());
}

HttpPage start_update(Desk& desk, const Ask& ask) {
  // Again, too: who began one may have died.
  const std::lock_guard lock(desk.mutex);
  desk.update_started = true;
  desk.updated.erase(ask.client);
  return page_of(200, {{"message", "Weight update started"}});
}

/// prime-rl's trainer has written the weights there, or has published them: then "…/step_12" and "…/step_12/weight" are
/// the version that it labelled step_12. Not number 12, since there is a step 0.
Result<UpdateRequest> request_of_directory(std::string directory) {
  while (directory.ends_with('/')) directory.pop_back();
  UpdateRequest request;
  if (has_weight_files(directory)) {
    request.directory = std::move(directory);
    return request;
  }
  std::filesystem::path path(directory);
  if (path.filename() == "weight") path = path.parent_path();
  request.version = path.filename().string();
  if (request.version.starts_with("step_")) return request;
  return Error(Errc::invalid_argument, "weight_dir " + directory + " has no safetensors files, and is no …/step_N");
}

/// Other trainers put there what vLLM's own engines take the weights from, which nothing here does.
Status check_update_info(const json& info) {
  if (!info.is_object()) return Error(Errc::invalid_argument, "'update_info' in the body is no object");
  if (info.contains("names")) {
    return Error(Errc::unsupported, "tensors do not come this way here: publish them (deltasync.adapters.trl)");
  }
  for (const auto& [name, value] : info.items()) {
    if (std::find(std::begin(kUpdateInfo), std::end(kUpdateInfo), name) != std::end(kUpdateInfo)) continue;
    return Error(Errc::invalid_argument, "update_info with '" + name + "': there is version, verify and deadline_ms");
  }
  return {};
}

/// Of a list, which has one for each worker, the one that all have.
Result<Ask> update_info_of(const Ask& ask) {
  Ask inner;
  const auto found = ask.body.find("update_info");
  if (found == ask.body.end() || found->is_null()) return inner;
  const bool listed = found->is_array() && !found->empty();
  const json& info = listed ? found->front() : *found;
  DS_TRY(check_update_info(info));
  if (listed && std::any_of(found->begin(), found->end(), [&](const json& other) { return other != info; })) {
    return Error(Errc::invalid_argument, "'update_info' in the body is not the same for all workers");
  }
  inner.body = info;
  return inner;
}

/// `deadline_ms` of it.
Result<std::optional<std::chrono::nanoseconds>> limit_of_update(const Ask& info) {
  const auto found = info.body.find("deadline_ms");
  std::optional<std::chrono::nanoseconds> limit;
  if (found == info.body.end() || found->is_null()) return limit;
  if (!found->is_number_unsigned() || found->get<std::uint64_t>() > kDeadlineMsMax) {
    return Error(Errc::invalid_argument, "'deadline_ms' in the body is no number of milliseconds");
  }
  limit = std::chrono::milliseconds(found->get<std::uint64_t>());
  return limit;
}

Result<UpdateRequest> request_of(const Ask& ask, const Ask& inner) {
  UpdateRequest request;
  for (const Ask& part : {std::cref(ask), std::cref(inner)}) {
    DS_ASSIGN(const auto version, part.text("version"));
    DS_ASSIGN(const auto directory, part.text("directory"));
    DS_ASSIGN(const bool reads_back, part.boolean("verify", request.verify));
    DS_ASSIGN(const bool verify, part.boolean("verify_checksum", reads_back));
    if (version) request.version = *version;
    if (directory) request.directory = *directory;
    request.verify = verify;
  }
  DS_ASSIGN(const auto directory, ask.text("weight_dir"));
  if (!directory || !request.version.empty() || !request.directory.empty()) return request;
  DS_ASSIGN(UpdateRequest named, request_of_directory(*directory));
  named.verify = request.verify;
  return named;
}

HttpPage update(Desk& desk, const Ask& ask) {
  const bool of_prime_rl = ask.body.contains("weight_dir");
  if (!of_prime_rl) {
    const std::lock_guard lock(desk.mutex);
    if (!desk.update_started) return refused(409, "start_weight_update comes before update_weights");
  }
  const auto info = update_info_of(ask);
  if (!info) return refused(info.error());
  const auto request = request_of(ask, *info);
  if (!request) return refused(request.error());
  const auto limit = limit_of_update(*info);
  if (!limit) return refused(limit.error());
  const Call call{.kind = Call::Kind::update, .mode = brief_pause(desk), .caches_as_paused = true};
  const Status done = desk.service.call(call, *request, "", *limit);
  if (const auto live = desk.service.standing().version; done && live) {
    const std::lock_guard lock(desk.mutex);
    desk.updated[ask.client] = live->id;
  }
  return told(done, of_prime_rl ? json{{"status", "ok"}} : json{{"message", "Weights updated"}});
}

/// AReaL's routes: {"success", "message"}.
HttpPage of_areal(const Status& done, const char* good) {
  return page_of(done ? 200 : 400, {{"success", done.ok()}, {"message", done ? good : done.error().message()}});
}

HttpPage areal_nccl(Desk&, const Ask&) {
  return page_of(501, {{"success", false}, {"message", "tensors do not come by NCCL here: use AReaL's disk mode"}});
}

HttpPage areal_update(Desk& desk, const Ask& ask) {
  const auto path = ask.text("model_path");
  if (!path) return of_areal(path.error(), "");
  if (!*path || (*path)->empty()) return of_areal(Error(Errc::invalid_argument, "no model_path in the body"), "");
  const Call call{.kind = Call::Kind::update, .mode = brief_pause(desk), .caches_as_paused = true};
  return of_areal(desk.service.call(call, {.directory = **path}), "Weights updated");
}

/// Of the version that the client brought. Where only one has brought any, this is the one, whatever its address is by
/// now.
HttpPage finish_update(Desk& desk, const Ask& ask) {
  const auto label = ask.label("weight_version");
  if (!label) return refused(label.error());
  const std::lock_guard lock(desk.mutex);
  if (!desk.update_started) return refused(409, "no weight update has been started");
  if (desk.updated.empty()) return refused(409, "no update_weights has succeeded since start_weight_update");
  auto own = desk.updated.find(ask.client);
  if (own == desk.updated.end() && desk.updated.size() == 1) own = desk.updated.begin();
  if (own == desk.updated.end()) {
    return refused(409, "no update_weights has come from " + ask.client + ", but from " +
                            std::to_string(desk.updated.size()) +
                            " other clients: begin with start_weight_update again");
  }
  const VersionId version = own->second;
  if (Status named = *label ? desk.service.rename(**label, version) : Status(); !named) return refused(named.error());
  desk.update_started = false;
  desk.updated.clear();
  return page_of(200, {{"message", "Weight update finished"}});
}

/// Level 0 pauses only; 1 and 2 give up what a wake with tags can take again. (Weights come back from the shadow, so
/// nothing is lost at 2.)
HttpPage sleep(Desk& desk, const Ask& ask) {
  const std::string_view said = ask.parameter("level");
  const std::string_view mode_said = ask.parameter("mode");
  const auto mode = mode_of(mode_said.empty() ? "abort" : mode_said);
  const unsigned level = said.empty() ? 1 : said == "0" || said == "1" || said == "2" ? unsigned(said[0] - '0') : 3;
  if (level > 2 || !mode) return refused(422, "level is 0, 1 or 2; mode is abort, wait or keep");
  const Call call = level == 0 ? Call{.kind = Call::Kind::pause, .mode = *mode}
                               : Call{.kind = Call::Kind::sleep, .mode = *mode, .memory = *memory_of({}, kTags)};
  return told(desk.service.call(call), {{"status", "sleeping"}, {"level", level}});
}

HttpPage wake(Desk& desk, const Ask& ask) {
  std::vector<std::string> tags = ask.list("tags");
  auto memory = memory_of(tags, kTags);
  if (!memory) return refused(memory.error());
  if (tags.empty()) *memory = MemorySet::all();
  const Status done =
      desk.service.call({.kind = Call::Kind::wake, .resumes = true, .may_stay_void = true, .memory = *memory});
  if (!done) return refused(done.error());
  const MemorySet asleep = desk.service.standing().engine.asleep;
  return page_of(200, {{"status", asleep.empty() ? "awake" : "sleeping"}, {"tags", tags}});
}

/// As OpenAI's clients list them.
HttpPage models(Desk& desk, const Ask&) {
  const std::string& model = desk.options.model;
  json entry = {{"id", model},   {"object", "model"}, {"created", 0}, {"owned_by", "deltasync"},
                {"root", model}, {"parent", nullptr}};
  const auto longest = "/vllm_config/model_config/max_model_len"_json_pointer;
  if (desk.engine_info.contains(longest)) entry["max_model_len"] = desk.engine_info.at(longest);
  return page_of(200, {{"object", "list"}, {"data", json::array({std::move(entry)})}});
}

constexpr Route kRoutes[] = {
    {"POST", "/pause", "stops admission", pause, "mode:abort/wait/keep clear_cache:boolean"},
    {"POST", "/resume", "serves again",
     [](Desk& desk, const Ask&) {
       return told(desk.service.call({.kind = Call::Kind::resume}), {{"status", "resumed"}});
     }},
    {"GET", "/is_paused", "whether it is paused",
     [](Desk& desk, const Ask&) {
       return page_of(200, {{"is_paused", !desk.service.standing().engine.serves()}});
     }},
    {"POST", "/abort_requests", "ends requests (without ids all)", abort_requests, "", "request_ids:texts"},
    {"POST", "/init_weight_transfer_engine", "does nothing: the receiver is connected", init_transfer, "",
     "init_info:object"},
    {"POST", "/start_weight_update", "begins an update", start_update},
    {"POST", "/update_weights", "takes a version (update_info.version, or weight_dir; else the newest)", update, "",
     "update_info:object weight_dir:text version:text directory:text verify_checksum:boolean"},
    {"POST", "/finish_weight_update", "ends an update (weight_version: its name)", finish_update, "",
     "weight_version:text"},
    {"POST", "/update_weight_version", "names the live version", name_version, "", "new_version:text"},
    {"GET", "/weight_info", "the live version's name",
     [](Desk& desk, const Ask&) { return page_of(200, live_weights(desk)); }},
    {"GET", "/get_world_size", "processes of the engine",
     [](Desk& desk, const Ask&) {
       return page_of(200, {{"world_size", desk.options.world_size}});
     }},
    {"POST", "/sleep", "gives up memory", sleep, "level:integer mode:abort/wait/keep"},
    {"POST", "/wake_up", "takes it again, and serves if nothing sleeps", wake, "tags:texts"},
    {"GET", "/is_sleeping", "whether anything sleeps",
     [](Desk& desk, const Ask&) {
       return page_of(200, {{"is_sleeping", !desk.service.standing().engine.asleep.empty()}});
     }},
    {"POST", "/reset_prefix_cache", "drops caches",
     [](Desk& desk, const Ask&) {
       return told(desk.service.call({.kind = Call::Kind::reset_caches}), {{"success", true}});
     }},
    {"GET", "/server_info", "what clients look for", server_info},
    {"GET", "/v1/models", "the model", models},
    {"POST", "/areal_pause_generation", "stops admission, and ends what runs",
     [](Desk& desk, const Ask&) { return of_areal(desk.service.call({.kind = Call::Kind::pause}), "paused"); }},
    {"POST", "/areal_continue_generation", "serves again",
     [](Desk& desk, const Ask&) { return of_areal(desk.service.call({.kind = Call::Kind::resume}), "continued"); }},
    {"POST", "/areal_update_weights", "takes what a directory has", areal_update, "", "model_path:text"},
    {"POST", "/areal_init_weights_update_group", "is not supported", areal_nccl},
    {"POST", "/areal_set_update_weight_meta", "is not supported", areal_nccl},
    {"POST", "/areal_update_weights_xccl", "is not supported", areal_nccl},
    {"POST", "/load_lora_adapter", "is not supported", lora_page},
    {"POST", "/v1/load_lora_adapter", "is not supported", lora_page},
};

}  // namespace
}  // namespace vllm

std::span<const Route> vllm_routes() {
  return vllm::kRoutes;
}

}  // namespace deltasync::control
