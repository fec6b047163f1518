#include "tools/cli/trace_timeline.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <set>
#include <utility>

namespace deltasync::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSchema = "deltasync-trace-1";
/// Two machines' clocks run apart by this much at most; crystals are good for 50 parts in a million each.
constexpr double kDriftPerUs = 100e-6;

std::optional<VersionId> parse_id(std::string_view text) {
  VersionId id;
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const char* const end = text.data() + text.size();
  const auto epoch = std::from_chars(text.data(), text.data() + colon, id.epoch, 16);
  const auto number = std::from_chars(text.data() + colon + 1, end, id.number);
  if (epoch.ec != std::errc() || epoch.ptr != text.data() + colon || number.ec != std::errc() || number.ptr != end) {
    return std::nullopt;
  }
  return id;
}

// ---- reading -----------------------------------------------------------------------------------------------------

constexpr std::size_t kNestingMax = 32;  ///< of arrays and objects: what walks over them calls itself for each
constexpr std::int64_t kIdMax = std::int64_t{1} << 53;  ///< of processes and threads: what viewers count exactly

bool too_deep(std::string_view json) {
  std::size_t depth = 0;
  bool in_text = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"') in_text = !in_text;
    if (in_text) {
      if (c == '\\') ++i;
    } else if (c == '[' || c == '{') {
      if (++depth > kNestingMax) return true;
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return false;
}

std::int64_t id_in(const Json& object, const char* field) {
  const Json& id = object.at(field);
  const bool whole = id.is_number_unsigned() ? id.get<std::uint64_t>() <= std::uint64_t{kIdMax}
                                             : id.is_number_integer() && id.get<std::int64_t>() >= 0;
  if (!whole) throw Json::out_of_range::create(406, std::string(field) + " is no number from 0 to 2^53", &id);
  return id.get<std::int64_t>();
}

/// Microseconds; what is beyond can neither be added up nor sorted.
double time_in(const Json& object, const char* field) {
  const double us = object.at(field).get<double>();
  if (std::abs(us) <= static_cast<double>(kIdMax)) return us;
  throw Json::out_of_range::create(406, std::string(field) + " is no time of at most 2^53 us", &object.at(field));
}

TraceProcess read_process(const Json& json, const std::string& source) {
  TraceProcess p;
  p.source = source;
  p.name = json.at("process").get<std::string>();
  p.pid = id_in(json, "pid");
  p.os_pid = json.contains("os_pid") ? id_in(json, "os_pid") : p.pid;
  p.host = json.at("host").get<std::string>();
  p.boot_id = json.at("boot_id").get<std::string>();
  p.clock = json.at("clock").get<std::string>();
  p.monotonic_us = time_in(json.at("anchor"), "monotonic_us");
  p.realtime_us = time_in(json.at("anchor"), "realtime_us");
  p.dropped = static_cast<std::uint64_t>(id_in(json, "dropped"));
  if (json.contains("offset_us")) p.offset_us = time_in(json, "offset_us");
  for (const Json& sight : json.at("clocks")) {
    p.sights.push_back({sight.at("clock").get<std::string>(), time_in(sight, "sent_us"), time_in(sight, "received_us"),
                        time_in(sight, "theirs_us")});
  }
  return p;
}

/// Throws what the JSON library throws about a field.
Timeline read_timeline(const Json& json, const std::string& source) {
  Timeline t;
  const Json& about = json.at("deltasync");
  std::map<std::int64_t, std::size_t> by_pid;
  for (const Json& process : about.at("processes")) {
    t.processes.push_back(read_process(process, source));
    by_pid.emplace(t.processes.back().pid, t.processes.size() - 1);
  }
  for (const Json& version : about.at("versions")) {
    if (const auto id = parse_id(version.at("id").get<std::string>())) t.labels[*id] = version.at("label");
  }
  for (const Json& event : json.at("traceEvents")) {
    const auto process = by_pid.find(id_in(event, "pid"));
    if (process == by_pid.end()) continue;  // somebody else's event
    TraceProcess& p = t.processes[process->second];
    const auto phase = event.at("ph").get<std::string>();
    if (phase == "M" && event.at("name") == "thread_name") {
      p.threads[id_in(event, "tid")] = event.at("args").at("name").get<std::string>();
    }
    if (phase != "X") continue;
    TraceSpan span;
    span.process = process->second;
    span.tid = id_in(event, "tid");
    span.name = event.at("name").get<std::string>();
    span.begin_us = time_in(event, "ts") - p.offset_us;
    span.dur_us = time_in(event, "dur");
    span.args = event.value("args", Json::object());
    if (span.args.contains("version")) span.version = parse_id(span.args.at("version").get<std::string>());
    t.spans.push_back(std::move(span));
  }
  for (TraceProcess& p : t.processes) p.offset_us = 0;
  return t;
}

// ---- clocks ------------------------------------------------------------------------------------------------------

/// The clock that all times are laid on: the one that most processes have or have looked at, the first of them whose
/// process is here. It may be nobody's: of an agent whose own file was not given.
std::string choose_clock(const std::vector<TraceProcess>& processes) {
  std::map<std::string, std::size_t> known_to;
  for (const TraceProcess& p : processes) {
    std::set<std::string> known{p.clock};
    for (const ClockSight& sight : p.sights) known.insert(sight.clock);
    for (const std::string& clock : known) ++known_to[clock];
  }
  std::string best;
  const auto offer = [&](const std::string& clock) {
    if (best.empty() || known_to[clock] > known_to[best]) best = clock;
  };
  for (const TraceProcess& p : processes) offer(p.clock);
  for (const TraceProcess& p : processes) {
    for (const ClockSight& sight : p.sights) offer(sight.clock);
  }
  return best;
}

/// By its own clock or by looks at the timeline's; false if there are none. `end_us`: of the process's last span, which
/// is where the timeline is looked at most.
bool place_clock(TraceProcess& p, double end_us, const std::string& clock, const std::vector<TraceProcess>& all) {
  if (p.clock == clock) {
    p.from = ClockFrom::same;
    p.offset_us = p.uncertainty_us = 0;
    return true;
  }
  double best = std::numeric_limits<double>::infinity();
  for (const TraceProcess& near : all) {
    if (near.clock != p.clock) continue;
    for (const ClockSight& sight : near.sights) {
      const double middle = (sight.sent_us + sight.received_us) / 2;
      const double uncertainty = (sight.received_us - sight.sent_us) / 2 + kDriftPerUs * std::abs(end_us - middle);
      if (sight.clock != clock || uncertainty >= best) continue;
      best = uncertainty;
      p.from = ClockFrom::measured;
      p.offset_us = sight.theirs_us - middle;
      p.uncertainty_us = uncertainty;
    }
  }
  return best != std::numeric_limits<double>::infinity();
}

/// By the time of day, which `reference` has been placed with.
void place_by_day(TraceProcess& p, const TraceProcess& reference) {
  p.from = ClockFrom::wall;
  p.offset_us =
      (p.realtime_us - p.monotonic_us) - (reference.realtime_us - reference.monotonic_us) + reference.offset_us;
}

/// All of them; somebody has the clock or has looked at it. `ends_us` by process.
void place_all(std::vector<TraceProcess>& processes, const std::vector<double>& ends_us, const std::string& clock) {
  const TraceProcess* reference = nullptr;
  std::vector<TraceProcess*> rest;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    TraceProcess& p = processes[i];
    if (!place_clock(p, ends_us[i], clock, processes)) {
      rest.push_back(&p);
    } else if (reference == nullptr || (p.from == ClockFrom::same && reference->from != ClockFrom::same)) {
      reference = &p;
    }
  }
  for (TraceProcess* const p : rest) place_by_day(*p, *reference);
}

/// Processes of two machines may have the same number: those that come later get numbers that nobody has.
void make_pids_unique(std::vector<TraceProcess>& processes) {
  std::set<std::int64_t> taken;
  std::vector<TraceProcess*> doubles;
  for (TraceProcess& p : processes) {
    if (!taken.insert(p.pid).second) doubles.push_back(&p);
  }
  std::int64_t next = 10'000'000;  // above what a machine's own numbers are
  for (TraceProcess* const p : doubles) {
    while (!taken.insert(next).second) ++next;
    p->pid = next;
  }
}

}  // namespace

const char* to_string(ClockFrom from) {
  switch (from) {
    case ClockFrom::same: return "same";
    case ClockFrom::measured: return "measured";
    case ClockFrom::wall: return "wall";
  }
  return "?";
}

std::string Timeline::name_of(const VersionId& version) const {
  const auto label = labels.find(version);
  return deltasync::to_string(Version{version, label == labels.end() ? std::string() : label->second});
}

Result<Timeline> parse_trace(std::string_view text, const std::string& source) {
  if (too_deep(text)) {
    return Error(Errc::corrupt, source + ": nested more than " + std::to_string(kNestingMax) + " levels deep");
  }
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) return Error(Errc::corrupt, source + ": not JSON");
  try {
    if (!json.is_object() || !json.contains("deltasync")) {
      return Error(Errc::unsupported, source + ": no timeline of deltasync");
    }
    if (json.at("deltasync").value("schema", std::string()) != kSchema) {
      return Error(Errc::unsupported, source + ": its schema is not " + kSchema);
    }
    return read_timeline(json, source);
  } catch (const Json::exception& e) {
    return Error(Errc::corrupt, source + ": " + e.what());
  }
}

Timeline merge_traces(std::vector<Timeline> traces) {
  Timeline all;
  for (Timeline& trace : traces) {
    const std::size_t first = all.processes.size();
    for (TraceProcess& p : trace.processes) all.processes.push_back(std::move(p));
    for (TraceSpan& span : trace.spans) {
      span.process += first;
      all.spans.push_back(std::move(span));
    }
    all.labels.merge(trace.labels);
  }
  make_pids_unique(all.processes);
  all.clock = choose_clock(all.processes);
  std::vector<double> ends(all.processes.size(), 0);
  for (const TraceSpan& span : all.spans) ends[span.process] = std::max(ends[span.process], span.end_us());
  place_all(all.processes, ends, all.clock);
  double first_us = std::numeric_limits<double>::infinity();
  for (TraceSpan& span : all.spans) {
    span.begin_us += all.processes[span.process].offset_us;
    first_us = std::min(first_us, span.begin_us);
  }
  if (all.spans.empty()) first_us = 0;
  for (TraceSpan& span : all.spans) span.begin_us -= first_us;
  for (TraceProcess& p : all.processes) p.offset_us -= first_us;
  std::stable_sort(all.spans.begin(), all.spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    return a.begin_us != b.begin_us ? a.begin_us < b.begin_us : a.dur_us > b.dur_us;
  });
  return all;
}

// ---- writing -----------------------------------------------------------------------------------------------------

namespace {

Json about(const TraceProcess& p) {
  Json json{{"process", p.name},
            {"pid", p.pid},
            {"os_pid", p.os_pid},
            {"host", p.host},
            {"boot_id", p.boot_id},
            {"clock", p.clock},
            {"anchor", {{"monotonic_us", p.monotonic_us}, {"realtime_us", p.realtime_us}}},
            {"dropped", p.dropped},
            {"offset_us", p.offset_us},
            {"clock_from", to_string(p.from)}};
  if (p.from != ClockFrom::wall) json["uncertainty_us"] = p.uncertainty_us;
  json["clocks"] = Json::array();
  for (const ClockSight& s : p.sights) {
    json["clocks"].push_back(
        {{"clock", s.clock}, {"sent_us", s.sent_us}, {"received_us", s.received_us}, {"theirs_us", s.theirs_us}});
  }
  return json;
}

Json metadata(const char* what, std::int64_t pid, std::int64_t tid, Json args) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", std::move(args)}};
}

/// Doubles are written as they are: a third digit of a microsecond is as far as the clock goes.
double rounded(double us) {
  return std::round(us * 1000) / 1000;
}

}  // namespace

std::string to_trace_json(const Timeline& timeline) {
  Json header{
      {"schema", kSchema}, {"clock", timeline.clock}, {"processes", Json::array()}, {"versions", Json::array()}};
  std::vector<Json> events;
  for (std::size_t i = 0; i < timeline.processes.size(); ++i) {
    const TraceProcess& p = timeline.processes[i];
    header["processes"].push_back(about(p));
    events.push_back(metadata("process_name", p.pid, 0, {{"name", p.name}}));
    events.push_back(metadata("process_sort_index", p.pid, 0, {{"sort_index", i}}));
    for (const auto& [tid, name] : p.threads) events.push_back(metadata("thread_name", p.pid, tid, {{"name", name}}));
  }
  for (const auto& [id, label] : timeline.labels) {
    header["versions"].push_back({{"id", deltasync::to_string(id)}, {"label", label}});
  }
  for (const TraceSpan& span : timeline.spans) {
    events.push_back({{"ph", "X"},
                      {"cat", "deltasync"},
                      {"name", span.name},
                      {"pid", timeline.processes[span.process].pid},
                      {"tid", span.tid},
                      {"ts", rounded(span.begin_us)},
                      {"dur", rounded(span.dur_us)},
                      {"args", span.args}});
  }
  const auto text = [](const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); };
  std::string out = "{\"displayTimeUnit\": \"ms\",\n\"deltasync\": " + text(header) + ",\n\"traceEvents\": [";
  const char* comma = "\n";
  for (const Json& event : events) {
    out += comma + text(event);
    comma = ",\n";
  }
  return out + "\n]}\n";
}

// ---- one version -------------------------------------------------------------------------------------------------

Result<VersionId> find_version(const Timeline& timeline, const std::optional<std::string>& wanted) {
  std::optional<VersionId> newest;
  std::optional<VersionId> committed;
  for (const TraceSpan& span : timeline.spans) {
    if (!span.version) continue;
    if (wanted) {
      const auto label = timeline.labels.find(*span.version);
      const bool meant = std::to_string(span.version->number) == *wanted ||
                         deltasync::to_string(*span.version) == *wanted ||
                         (label != timeline.labels.end() && label->second == *wanted);
      if (!meant) continue;
    }
    if (!newest || *newest < *span.version) newest = span.version;
    if (span.name == "commit" && (!committed || *committed < *span.version)) committed = span.version;
  }
  if (committed) return *committed;
  if (newest) return *newest;
  return Error(Errc::not_found, wanted ? "no span of version '" + *wanted + "'" : "no span of any version");
}

namespace {

/// Sorted and joined where they touch.
std::vector<std::pair<double, double>> joined(std::vector<std::pair<double, double>> list) {
  std::sort(list.begin(), list.end());
  std::vector<std::pair<double, double>> out;
  for (const auto& [begin, end] : list) {
    if (!out.empty() && begin <= out.back().second) {
      out.back().second = std::max(out.back().second, end);
    } else {
      out.emplace_back(begin, end);
    }
  }
  return out;
}

/// Spans of one process and name.
Stage make_stage(const std::vector<const TraceSpan*>& spans, double zero_us) {
  Stage stage;
  stage.process = spans.front()->process;
  stage.name = spans.front()->name;
  stage.spans = spans.size();
  std::map<std::int64_t, std::vector<std::pair<double, double>>> by_thread;
  std::vector<std::pair<double, double>> all;
  std::uint64_t bytes_of[2] = {0, 0};  // of whole stages, of their parts
  for (const TraceSpan* span : spans) {
    const std::pair<double, double> interval(span->begin_us - zero_us, span->end_us() - zero_us);
    by_thread[span->tid].push_back(interval);
    all.push_back(interval);
    if (const auto bytes = span->args.find("bytes"); bytes != span->args.end() && bytes->is_number_unsigned()) {
      bytes_of[span->is_part() ? 1 : 0] += bytes->get<std::uint64_t>();
    }
  }
  stage.bytes = bytes_of[0] != 0 ? bytes_of[0] : bytes_of[1];
  stage.intervals = joined(std::move(all));
  stage.begin_us = stage.intervals.front().first;
  stage.end_us = stage.intervals.back().second;
  for (auto& [tid, intervals] : by_thread) {
    for (const auto& [begin, end] : joined(std::move(intervals))) stage.busy_us += end - begin;
  }
  return stage;
}

}  // namespace

std::vector<Stage> stages_of(const Timeline& timeline, const VersionId& version) {
  std::map<std::pair<std::size_t, std::string>, std::vector<const TraceSpan*>> groups;
  std::optional<double> zero_us;
  bool offloaded = false;
  for (const TraceSpan& span : timeline.spans) {
    if (span.version != version) continue;
    groups[{span.process, span.name}].push_back(&span);
    if (!zero_us || (!offloaded && span.name == "offload")) zero_us = span.begin_us;
    offloaded = offloaded || span.name == "offload";
  }
  std::vector<Stage> stages;
  stages.reserve(groups.size());
  for (const auto& [key, spans] : groups) stages.push_back(make_stage(spans, *zero_us));
  std::stable_sort(stages.begin(), stages.end(),
                   [](const Stage& a, const Stage& b) { return a.begin_us < b.begin_us; });
  return stages;
}

}  // namespace deltasync::tools
