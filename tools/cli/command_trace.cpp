// `deltasync trace`: what several processes recorded, on one timeline.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>

#include "format/mapped_file.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/http_get.hpp"
#include "tools/cli/trace_timeline.hpp"

namespace deltasync::cli {
namespace {

using tools::Stage;
using tools::Timeline;
using tools::TraceProcess;

struct TraceArgs {
  std::vector<std::string> sources;
  TlsOptions tls;
  std::string out;
  std::string svg;
  std::optional<std::string> version;
  double deadline_s = 10;
  bool summary = false;
  bool json = false;
};

Result<std::string> read_source(const TraceArgs& options, const std::string& source) {
  if (tools::is_http_url(source)) {
    DS_ASSIGN(const tools::HttpSource agent, tools::parse_http_source(source, options.tls));
    const auto limit =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(options.deadline_s));
    return tools::http_get(agent, "/v1/trace", Deadline::after(limit)).with_context(source);
  }
  DS_ASSIGN(const MappedFile file, MappedFile::open(source));
  return std::string(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
}

Result<Timeline> read_timeline(const TraceArgs& options) {
  std::vector<Timeline> traces;
  for (const std::string& source : options.sources) {
    DS_ASSIGN(const std::string text, read_source(options, source));
    DS_ASSIGN(Timeline trace, tools::parse_trace(text, source));
    traces.push_back(std::move(trace));
  }
  return tools::merge_traces(std::move(traces));
}

Status write_file(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) return Error::from_errno(path, errno != 0 ? errno : EIO);
  return {};
}

// ---- the summary -------------------------------------------------------------------------------------------------

Json clocks_json(const Timeline& timeline) {
  Json list = Json::array();
  for (const TraceProcess& p : timeline.processes) {
    Json json{{"process", p.name}, {"pid", p.os_pid}, {"host", p.host}, {"clock_from", tools::to_string(p.from)}};
    if (p.from != tools::ClockFrom::wall) json["uncertainty_s"] = p.uncertainty_us / 1e6;
    json["dropped"] = p.dropped;
    list.push_back(std::move(json));
  }
  return list;
}

Json summary_json(const Timeline& timeline, const VersionId& version, const std::vector<Stage>& stages) {
  const auto label = timeline.labels.find(version);
  Json json{{"event", "timeline"},
            {"id", to_string(version)},
            {"number", version.number},
            {"label", label == timeline.labels.end() ? std::string() : label->second},
            {"processes", clocks_json(timeline)},
            {"stages", Json::array()}};
  for (const Stage& s : stages) {
    json["stages"].push_back({{"process", timeline.processes[s.process].name},
                              {"pid", timeline.processes[s.process].os_pid},
                              {"stage", s.name},
                              {"begin_s", s.begin_us / 1e6},
                              {"took_s", (s.end_us - s.begin_us) / 1e6},
                              {"busy_s", s.busy_us / 1e6},
                              {"bytes", s.bytes},
                              {"spans", s.spans}});
  }
  return json;
}

std::string left(const std::string& text, std::size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text;
}

std::string right(const std::string& text, std::size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

std::string ms(double us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", us / 1000);
  return text;
}

/// What a reader has to know before he believes the times.
Status print_clocks(const Timeline& timeline) {
  for (const TraceProcess& p : timeline.processes) {
    if (p.from == tools::ClockFrom::measured) {
      DS_TRY(
          print_line("  " + p.name + " on " + p.host + ": its clock was measured, ± " + ms(p.uncertainty_us) + " ms"));
    } else if (p.from == tools::ClockFrom::wall) {
      DS_TRY(print_line("  " + p.name + " on " + p.host +
                        ": its clock was not measured; placed by the time of day, which may be off by anything"));
    }
    if (p.dropped > 0) {
      DS_TRY(print_line("  " + p.name + ": " + std::to_string(p.dropped) + " older spans were dropped"));
    }
  }
  return {};
}

Status print_summary(const Timeline& timeline, const VersionId& version, const std::vector<Stage>& stages) {
  DS_TRY(print_line(timeline.name_of(version) + ": " + std::to_string(stages.size()) +
                    " stages; ms after offload was called"));
  DS_TRY(print_clocks(timeline));
  std::size_t name_width = 7;
  for (const Stage& s : stages) name_width = std::max(name_width, timeline.processes[s.process].name.size());
  DS_TRY(print_line("  " + left("process", name_width + 2) + left("stage", 17) + right("begin", 10) +
                    right("took", 10) + right("busy", 10) + right("bytes", 13)));
  for (const Stage& s : stages) {
    DS_TRY(print_line("  " + left(timeline.processes[s.process].name, name_width + 2) + left(s.name, 17) +
                      right(ms(s.begin_us), 10) + right(ms(s.end_us - s.begin_us), 10) + right(ms(s.busy_us), 10) +
                      right(s.bytes == 0 ? "" : human_bytes(s.bytes), 13)));
  }
  return {};
}

Status run_trace(const TraceArgs& options) {
  DS_ASSIGN(const Timeline timeline, read_timeline(options));
  if (!options.out.empty()) {
    DS_TRY(write_file(options.out, tools::to_trace_json(timeline)));
    if (!options.json) {
      DS_TRY(print_line(std::to_string(timeline.spans.size()) + " spans of " +
                        std::to_string(timeline.processes.size()) + " processes in " + options.out));
    }
  }
  const bool summary = options.summary || options.json || (options.out.empty() && options.svg.empty());
  if (!summary && options.svg.empty()) return {};
  auto version = tools::find_version(timeline, options.version);
  if (!version) return std::move(version).error().with_context(options.sources.front());
  if (!options.svg.empty()) DS_TRY(write_file(options.svg, tools::to_svg(timeline, *version)));
  if (!summary) return {};
  const std::vector<Stage> stages = tools::stages_of(timeline, *version);
  if (options.json) return print_json(summary_json(timeline, *version, stages));
  return print_summary(timeline, *version, stages);
}

}  // namespace

std::function<Status()> setup_trace(CLI::App& app) {
  auto options = std::make_shared<TraceArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("SOURCE", options->sources,
                 "files that --trace wrote, and http:// or https://HOST:PORT of agents with --trace")
      ->required()
      ->expected(1, -1);
  add_tls_options(app, options->tls);
  app.add_option("-o,--out", options->out, "write one timeline, for ui.perfetto.dev or chrome://tracing")
      ->type_name("FILE");
  app.add_option("--svg", options->svg, "draw one version")->type_name("FILE");
  app.add_flag("--summary", options->summary,
               "a line a stage of one version (this is what happens without -o and --svg)");
  app.add_option("--version", options->version, "number, id or label (default: the newest that was committed)")
      ->type_name("VERSION");
  app.add_option("--deadline-s", options->deadline_s, "for each agent")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 3600.0));
  app.add_flag("--json", options->json, "the summary as one JSON object");
  return [options] { return run_trace(*options); };
}

}  // namespace deltasync::cli
