// SGLang's routes for weight updates, and slime's /pull_weights.
#include <chrono>
#include <utility>

#include "receiver/control/routes.hpp"

namespace deltasync::control {
namespace sglang {
namespace {

using net::HttpPage;
using nlohmann::json;

constexpr Tag kTags[] = {
    {"weights", EngineMemory::weights}, {"kv_cache", EngineMemory::kv_cache}, {"cuda_graph", EngineMemory::cuda_graph}};

/// {"success", "message"}: 200, or 400 whatever has failed.
HttpPage told(const Status& done, const std::string& good, json more = json::object()) {
  more["success"] = done.ok();
  more["message"] = done ? good : done.error().message();
  return page_of(done ? 200 : 400, more);
}

HttpPage refused(const std::string& why) {
  return page_of(400, {{"error", {{"message", why}}}});
}

HttpPage pause(Desk& desk, const Ask& ask) {
  const auto said = ask.text("mode");
  const std::string mode = said ? said->value_or("abort") : "a mode that is no text";
  Call call{.kind = Call::Kind::pause};
  if (mode == "retract" || mode == "in_place") {
    call.mode = PauseMode::keep;
    call.resets_caches = mode == "retract";
  } else if (mode != "abort") {
    return refused("mode is abort, retract or in_place, not " + mode);
  }
  const Status done = desk.service.call(call);
  if (!done) return refused(done.error().message());
  return page_of(200, {{"message", "Generation paused successfully."}, {"status", "ok"}});
}

HttpPage go_on(Desk& desk, const Ask&) {
  const Status done = desk.service.call({.kind = Call::Kind::resume});
  if (!done) return refused(done.error().message());
  return page_of(200, {{"message", "Generation continued successfully."}, {"status", "ok"}});
}

/// Without a timeout, or with 0 as their clients send it: as long as any call.
Status flush_within(Desk& desk, const Ask& ask) {
  DS_ASSIGN(auto limit, limit_of(ask));
  if (limit == std::chrono::nanoseconds(0)) limit.reset();
  return desk.service.call({.kind = Call::Kind::reset_caches}, {}, "", limit);
}

HttpPage flush(Desk& desk, const Ask& ask) {
  const Status done = flush_within(desk, ask);
  return {done ? 200U : 400U, "text/plain; charset=utf-8", done ? "Cache flushed.\n" : done.error().message() + "\n"};
}

HttpPage change_memory(Desk& desk, const Ask& ask, Call::Kind kind) {
  const auto tags = ask.texts("tags");
  if (!tags) return refused(tags.error().message());
  // Without tags: what every engine has, and on waking all that sleeps.
  const std::vector<std::string> usual = {"weights", "kv_cache"};
  auto memory = memory_of(tags->empty() ? usual : *tags, kTags);
  if (memory && tags->empty() && kind == Call::Kind::wake) *memory = MemorySet::all();
  if (!memory) return refused(memory.error().message());
  const Status done = desk.service.call({.kind = kind, .may_stay_void = true, .memory = *memory});
  return done ? page_of(200, nullptr) : refused(done.error().message());
}

/// The live version, as slime's clients know it: the directory that they were told it was put into.
HttpPage pull(Desk& desk, const Ask& ask) {
  const auto number = ask.text("target_version");
  const auto directory = ask.text("local_checkpoint_dir");
  if (!number) return told(number.error(), "");
  if (!directory) return told(directory.error(), "");
  UpdateRequest request;
  if (*number && **number != "0") request.version = **number;
  {
    const std::lock_guard lock(desk.mutex);
    desk.pulled_directory.clear();
  }
  const Call call{.kind = Call::Kind::update, .mode = brief_pause(desk), .caches_as_paused = true};
  const Status done = desk.service.call(call, request);
  const std::optional<Version> live = desk.service.standing().version;
  if (done && *directory) {
    const std::lock_guard lock(desk.mutex);
    desk.pulled_directory = **directory;
    desk.pulled = live ? std::optional(live->id) : std::nullopt;
  }
  return told(done, "version " + desk.service.standing().label + " is live");
}

/// What deltasync's own clients give it, in seconds.
Result<std::optional<std::chrono::nanoseconds>> limit_of_update(const Ask& ask) {
  const auto place = "/manifest/deltasync/timeout"_json_pointer;
  std::optional<std::chrono::nanoseconds> limit;
  if (!ask.body.contains(place)) return limit;
  const json& given = ask.body.at(place);
  const double seconds = given.is_number() ? given.get<double>() : -1;
  if (!(seconds >= 0 && seconds < 1e6)) {
    return Error(Errc::invalid_argument, "the timeout in the manifest is no number of seconds");
  }
  limit = std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
  return limit;
}

/// What a directory has; after /pull_weights into it, the version that is live already. deltasync's own clients name
/// the version, and the directory only because SGLang wants one.
HttpPage update_from_disk(Desk& desk, const Ask& ask) {
  const auto path = ask.text("model_path");
  const auto label = ask.label("weight_version");
  const auto flushes = ask.boolean("flush_cache", true);
  const auto aborts = ask.boolean("abort_all_requests", false);
  const auto format = ask.text("load_format");
  const auto limit = limit_of_update(ask);
  if (!limit) return told(limit.error(), "");
  if (!format) return told(format.error(), "");
  if (!path) return told(path.error(), "");
  if (!label) return told(label.error(), "");
  if (!flushes) return told(flushes.error(), "");
  if (!aborts) return told(aborts.error(), "");
  if (!*path || (*path)->empty()) return told(Error(Errc::invalid_argument, "no model_path in the body"), "");
  const std::optional<Version> live = desk.service.standing().version;
  bool pulled = false;
  {
    const std::lock_guard lock(desk.mutex);
    pulled = **path == desk.pulled_directory && live && live->id == desk.pulled;
  }
  Status done;
  if (!pulled) {
    const Call call{
        .kind = Call::Kind::update, .mode = *aborts ? PauseMode::abort : brief_pause(desk), .resets_caches = *flushes};
    UpdateRequest request;
    if (*format == "deltasync") {
      request.version = label->value_or("");
    } else {
      request.directory = **path;
    }
    done = desk.service.call(call, request, label->value_or(""), *limit);
  } else {
    if (*flushes) done = desk.service.call({.kind = Call::Kind::reset_caches});
    if (done && *label) done = desk.service.rename(**label);
  }
  return told(done, "Succeeded to update model weights.", {{"num_paused_requests", 0}});
}

HttpPage model_info(Desk& desk, const Ask&) {
  json page = live_weights(desk);
  page["model_path"] = desk.options.model;
  return page_of(200, page);
}

HttpPage abort_request(Desk& desk, const Ask& ask) {
  const auto all = ask.boolean("abort_all", false);
  const auto id = ask.text("rid");
  if (!all) return refused(all.error().message());
  if (!id) return refused(id.error().message());
  if (!*all && (!*id || (*id)->empty())) return refused("give rid, or abort_all=true");
  const auto done = desk.service.abort(*all ? std::vector<std::string>() : std::vector{**id});
  return done ? HttpPage{200, "text/plain; charset=utf-8", ""} : refused(done.error().message());
}

HttpPage not_here(Desk&, const Ask&) {
  return page_of(501, {{"success", false},
                       {"message",
                        "tensors do not come this way here: ask /pull_weights, which takes them from the "
                        "trainer"}});
}

constexpr Route kRoutes[] = {
    {"POST", "/pause_generation", "stops admission", pause, "", "mode:abort/retract/in_place"},
    {"POST", "/continue_generation", "serves again", go_on},
    {"GET POST", "/flush_cache", "drops caches (timeout in seconds)", flush, "timeout:number"},
    {"GET POST", "/release_memory_occupation", "gives up memory (tags)",
     [](Desk& desk, const Ask& ask) { return change_memory(desk, ask, Call::Kind::sleep); }, "", "tags:texts"},
    {"GET POST", "/resume_memory_occupation", "takes it again (tags)",
     [](Desk& desk, const Ask& ask) { return change_memory(desk, ask, Call::Kind::wake); }, "", "tags:texts"},
    {"POST", "/pull_weights", "takes a version (0: the newest)", pull, "",
     "target_version:text local_checkpoint_dir:text source_dir:text"},
    {"POST", "/update_weights_from_disk", "takes what a directory has, or, after /pull_weights into it, names that",
     update_from_disk, "",
     "model_path:text load_format:text weight_version:text flush_cache:boolean abort_all_requests:boolean"},
    {"POST", "/update_weight_version", "names the live version", name_version, "", "new_version:text"},
    {"GET", "/model_info", "the model, and the live version's name", model_info},
    {"GET", "/get_model_info", "the same", model_info},
    {"GET", "/get_weight_version", "the live version's name",
     [](Desk& desk, const Ask&) {
       return page_of(200, {{"weight_version", desk.service.standing().label}});
     }},
    {"GET", "/server_info", "what clients look for", server_info},
    {"GET", "/get_server_info", "the same", server_info},
    {"POST", "/abort_request", "ends requests (rid, or abort_all)", abort_request, "", "rid:text abort_all:boolean"},
    {"POST", "/update_weights_from_tensor", "is not supported", not_here},
    {"POST", "/update_weights_from_distributed", "is not supported", not_here},
    {"POST", "/update_weights_from_ipc", "is not supported", not_here},
    {"POST", "/init_weights_update_group", "is not supported", not_here},
    {"POST", "/load_lora_adapter", "is not supported", lora_page},
};

}  // namespace
}  // namespace sglang

std::span<const Route> sglang_routes() {
  return sglang::kRoutes;
}

}  // namespace deltasync::control
