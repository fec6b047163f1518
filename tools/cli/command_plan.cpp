// `deltasync plan`: how long until the engines of a fleet serve a version, and what that hangs on.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capacity/plan.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

using capacity::Prediction;
using capacity::Rates;

struct PlanArgs {
  std::string topology;
  std::vector<std::string> benchmarks;
  std::uint64_t seed = 1;
  std::uint64_t engines = 0;
  bool json = false;
};

/// What is asked, and what the model says.
struct Planned {
  capacity::Topology topology;
  Rates rates;
  Prediction now;
  std::optional<capacity::RelayLevel> relays;
  std::optional<double> engines_s;  ///< until --engines of them have it
};

Result<Planned> make_plan(const PlanArgs& options) {
  Planned out;
  DS_ASSIGN(const std::string text, read_text(options.topology));
  DS_ASSIGN(out.topology, capacity::parse_topology(text, options.topology));
  out.rates = capacity::builtin_rates();
  for (const std::string& path : options.benchmarks) {
    DS_ASSIGN(const std::string lines, read_text(path));
    DS_TRY(capacity::add_benchmarks(out.rates, lines, path));
  }
  out.now = capacity::predict(out.topology, out.rates, options.seed);
  const std::size_t all = out.now.ready_s.size();
  if (options.engines > all) {
    return Error(Errc::invalid_argument, "--engines " + std::to_string(options.engines) + ": " + options.topology +
                                             " has " + std::to_string(all));
  }
  if (options.engines > 0) out.engines_s = out.now.ready_s[options.engines - 1];
  out.relays = capacity::add_relay_level(out.topology, out.rates, options.seed, out.now);
  return out;
}

Json path_json(const Prediction& prediction) {
  Json path = Json::array();
  for (const capacity::PathShare& part : prediction.path) {
    path.push_back({{"stage", part.stage}, {"limit", part.limit}, {"seconds", part.seconds}});
  }
  return path;
}

Json plan_json(const Planned& plan) {
  const Prediction& now = plan.now;
  const capacity::PathShare bottleneck = now.bottleneck();
  Json json = {{"event", "planned"},
               {"mode", now.full ? "full" : "delta"},
               {"engines", now.ready_s.size()},
               {"full_bytes", std::llround(plan.topology.model.bytes())},
               {"wire_bytes", std::llround(now.wire_bytes)},
               {"half_s", now.until(0.5)},
               {"most_s", now.until(0.9)},
               {"all_s", now.all_s()}};
  if (plan.engines_s) json["engines_s"] = *plan.engines_s;
  json["bottleneck"] = {{"limit", bottleneck.limit}, {"seconds", bottleneck.seconds}};
  json["path"] = path_json(now);
  if (plan.relays) {
    json["relay_level"] = {{"before", plan.relays->before},
                           {"relays", plan.relays->count},
                           {"all_s", plan.relays->then.all_s()},
                           {"bottleneck", plan.relays->then.bottleneck().limit}};
  }
  json["assumed"] = plan.rates.assumed;
  return json;
}

std::string widened(std::string text, std::size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text;
}

Status print_path(const Prediction& now) {
  std::size_t stage = 6;
  std::size_t limit = 6;
  for (const capacity::PathShare& part : now.path) {
    stage = std::max(stage, part.stage.size());
    limit = std::max(limit, part.limit.size());
  }
  DS_TRY(print_line("the last engine:"));
  for (const capacity::PathShare& part : now.path) {
    DS_TRY(print_line("  " + widened(part.stage, stage + 2) + widened(part.limit, limit + 2) +
                      human_seconds(part.seconds)));
  }
  return {};
}

Status print_relays(const Planned& plan) {
  if (!plan.relays) return {};
  const double gain_s = plan.now.all_s() - plan.relays->then.all_s();
  const std::string level = "another level of relays: " + std::to_string(plan.relays->count) + " before the " +
                            plan.relays->before + ": 100% after " + human_seconds(plan.relays->then.all_s());
  return print_line(level + (gain_s > 0 ? ", " + human_seconds(gain_s) + " sooner" : ", no gain") +
                    "; then the limit is " + plan.relays->then.bottleneck().limit);
}

Status print_plan(const Planned& plan) {
  const Prediction& now = plan.now;
  const auto bytes = static_cast<std::uint64_t>(now.wire_bytes);
  DS_TRY(print_line(std::string(now.full ? "whole model" : "delta") + ", " + human_bytes(bytes) + " to each of " +
                    std::to_string(now.ready_s.size()) + " engines, seconds from the offload on"));
  DS_TRY(print_line("  50% of the engines   " + human_seconds(now.until(0.5))));
  DS_TRY(print_line("  90%                  " + human_seconds(now.until(0.9))));
  DS_TRY(print_line("  100%                 " + human_seconds(now.all_s())));
  if (plan.engines_s) DS_TRY(print_line("  as many as asked     " + human_seconds(*plan.engines_s)));
  DS_TRY(print_path(now));
  const capacity::PathShare bottleneck = now.bottleneck();
  DS_TRY(print_line("bottleneck: " + bottleneck.limit + ", " + human_seconds(bottleneck.seconds) + " of " +
                    human_seconds(now.all_s())));
  DS_TRY(print_relays(plan));
  if (plan.rates.assumed.empty()) return {};
  std::string cases;
  for (const std::string& name : plan.rates.assumed) cases += " " + name;
  return print_line("assumed, from another machine (give --bench):" + cases);
}

Status run_plan(const PlanArgs& options) {
  DS_ASSIGN(const Planned plan, make_plan(options));
  return options.json ? print_json(plan_json(plan)) : print_plan(plan);
}

}  // namespace

std::function<Status()> setup_plan(CLI::App& app) {
  auto options = std::make_shared<PlanArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("TOPOLOGY", options->topology, "hosts, links and model, in TOML (planning.md)")->required();
  app.add_option("--bench", options->benchmarks,
                 "what deltasync bench CASE --json printed on your machines, of e2e, full and relay; may "
                 "be repeated")
      ->type_name("FILE")
      ->allow_extra_args(false);
  app.add_option("--seed", options->seed, "says which hosts are slower")->capture_default_str()->check(not_negative);
  app.add_option("--engines", options->engines, "also say when so many engines have the version")->check(one_or_more);
  app.add_flag("--json", options->json, "one JSON object");
  return [options] { return run_plan(*options); };
}

}  // namespace deltasync::cli
