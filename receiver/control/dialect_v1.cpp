// FastDeploy's routes. Every answer has the same envelope; the HTTP status is the error's.
#include <atomic>
#include <utility>

#include "receiver/control/routes.hpp"

namespace deltasync::control {
namespace v1 {
namespace {

using net::HttpPage;
using nlohmann::json;

constexpr Tag kTags[] = {{"weight", EngineMemory::weights}, {"kv_cache", EngineMemory::kv_cache}};

HttpPage envelope(const Status& done, json result = nullptr) {
  static std::atomic<std::uint64_t> count{0};
  json page = {{"request_id", "control-" + std::to_string(++count)},
               {"status", done ? "success" : "error"},
               {"error_message", nullptr},
               {"result", done ? std::move(result) : json(nullptr)}};
  if (done) return page_of(200, page);
  page["error_message"] = done.error().message();
  // A state that does not allow it is 500 there, and so are all failures of the engine.
  const unsigned status = status_of(done.error());
  return page_of(status == 409 ? 500 : status, page);
}

Status pause(Desk& desk, const Ask& ask) {
  const std::string_view said = ask.parameter("mode");
  const auto mode = mode_of(said.empty() ? "abort" : said);
  if (!mode) return Error(Errc::invalid_argument, "mode is abort, wait or keep, not " + std::string(said));
  DS_ASSIGN(const auto limit, limit_of(ask));
  return desk.service.call({.kind = Call::Kind::pause, .mode = *mode}, {}, "", limit);
}

Status sleep(Desk& desk, const Ask& ask) {
  DS_ASSIGN(const MemorySet memory, memory_of(ask.list("tags"), kTags));
  return desk.service.call({.kind = Call::Kind::sleep, .memory = memory});
}

Status wake(Desk& desk, const Ask& ask) {
  const std::vector<std::string> tags = ask.list("tags");
  DS_ASSIGN(MemorySet memory, memory_of(tags, kTags));
  if (tags.empty()) memory = MemorySet::all();
  return desk.service.call({.kind = Call::Kind::wake,
                            .resumes = true,
                            .kv_cache_first = desk.options.graphs_use_kv_cache,
                            .memory = memory});
}

Status update(Desk& desk, const Ask& ask) {
  UpdateRequest request;
  DS_ASSIGN(const auto version, ask.text("version"));
  DS_ASSIGN(request.verify, ask.boolean("verify_checksum", false));
  DS_ASSIGN(const auto directory, ask.text("directory"));
  request.version = version.value_or("");
  request.directory = directory.value_or("");
  if (desk.service.standing().engine.serves()) {
    return Error(Errc::version_conflict, "Pause LLM Engine first before calling updating weights");
  }
  return desk.service.call({.kind = Call::Kind::update, .must_be_paused = true}, request);
}

Result<std::uint64_t> abort(Desk& desk, const Ask& ask) {
  DS_ASSIGN(const bool all, ask.boolean("abort_all", false));
  DS_ASSIGN(const std::vector<std::string> ids, ask.texts("req_ids"));
  if (all == !ids.empty()) return Error(Errc::invalid_argument, "give abort_all=true, or req_ids");
  return desk.service.abort(ids);
}

/// The older routes say no more than whether it worked.
HttpPage old_answer(const Status& done) {
  return done ? HttpPage{200, "text/plain; charset=utf-8", ""}
              : HttpPage{404, "text/plain; charset=utf-8", done.error().message() + "\n"};
}

constexpr Route kRoutes[] = {
    {"POST", "/v1/pause", "stops admission and ends what runs (timeout in seconds)",
     [](Desk& desk, const Ask& ask) { return envelope(pause(desk, ask)); }, "mode:abort/wait/keep timeout:number"},
    {"POST", "/v1/resume", "serves again",
     [](Desk& desk, const Ask&) { return envelope(desk.service.call({.kind = Call::Kind::resume})); }},
    {"GET", "/v1/is_paused", "whether it is paused",
     [](Desk& desk, const Ask&) {
       return envelope({}, {{"is_paused", !desk.service.standing().engine.serves()}});
     }},
    {"POST", "/v1/sleep", "gives up memory (weight, kv_cache)",
     [](Desk& desk, const Ask& ask) { return envelope(sleep(desk, ask)); }, "tags:texts"},
    {"POST", "/v1/wakeup", "takes it again, and serves",
     [](Desk& desk, const Ask& ask) { return envelope(wake(desk, ask)); }, "tags:texts"},
    {"GET", "/v1/placement", "the HF tensors of each live parameter",
     [](Desk& desk, const Ask&) {
       json names = json::object();
       for (const auto& [parameter, tensor] : desk.weights.live_names()) names[parameter].push_back(tensor);
       return envelope({}, std::move(names));
     }},
    {"POST", "/v1/update_weights", "takes a version, or what a directory has; the engine must be paused",
     [](Desk& desk, const Ask& ask) {
       const Status done = update(desk, ask);
       return envelope(done, json::array({{{"version", desk.service.standing().label}}}));
     },
     "", "version:text directory:text verify_checksum:boolean"},
    {"POST", "/v1/abort_requests", "ends requests (abort_all, or req_ids)",
     [](Desk& desk, const Ask& ask) {
       const auto aborted = abort(desk, ask);
       return aborted ? envelope({}, {{"aborted", *aborted}}) : envelope(aborted.error());
     },
     "", "abort_all:boolean req_ids:texts"},
    {"GET", "/clear_load_weight", "sleeps", [](Desk& desk, const Ask&) { return old_answer(sleep(desk, {})); }},
    {"GET", "/update_model_weight", "wakes up", [](Desk& desk, const Ask&) { return old_answer(wake(desk, {})); }},
};

}  // namespace
}  // namespace v1

std::span<const Route> v1_routes() {
  return v1::kRoutes;
}

}  // namespace deltasync::control
