// `deltasync status`: versions and receivers of a live agent, or how one receiver stands, from its HTTP pages.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/utf8.hpp"
#include "tools/cli/agent_standing.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/follow.hpp"
#include "tools/cli/http_get.hpp"

namespace deltasync::cli {
namespace {

struct StatusArgs {
  std::string http;
  TlsOptions tls;
  double deadline_s = 10;
  bool json = false;
};

using Row = std::vector<std::string>;

/// Columns as wide as what is in them, two blanks apart; the last one is not padded.
Status print_table(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], printable(row[i]).size());
  }
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      std::string cell = printable(row[i]);
      if (i + 1 < row.size()) cell.resize(widths[i] + 2, ' ');
      line += cell;
    }
    DS_TRY(print_line(line.substr(0, line.find_last_not_of(' ') + 1)));
  }
  return {};
}

/// "step_12 (7f…:12)", or "-".
std::string version_text(const Json& version) {
  if (!version.is_object()) return "-";
  const std::string id = version.contains("id") ? version.at("id").get<std::string>()
                                                : version.at("epoch").get<std::string>() + ":" +
                                                      std::to_string(version.at("number").get<std::uint64_t>());
  const auto label = version.value("label", std::string());
  return label.empty() ? id : label + " (" + id + ")";
}

/// How long ago, or for how long.
std::string age_text(const Json& seconds) {
  return seconds.is_number() ? human_age(seconds.get<double>()) : "unknown";
}

/// When a version was published. Of one that an agent found at its start it does not know.
std::string published_text(const Json& version) {
  if (version.value("found_at_start", false)) return "before this agent's start";
  return age_text(version.at("age_s")) + " ago";
}

Status print_versions(const Json& page) {
  std::vector<Row> rows = {{"VERSION", "PUBLISHED", "DELTA", "CHANGED"}};
  const Json& active = page.at("active");
  const Json& ring = page.at("ring").at("entries");
  for (auto entry = ring.rbegin(); entry != ring.rend(); ++entry) {
    rows.push_back({version_text(entry->at("to")), published_text(*entry),
                    human_bytes(entry->at("bytes").get<std::uint64_t>()),
                    std::to_string(entry->at("changed").get<std::uint64_t>())});
  }
  if (ring.empty()) rows.push_back({version_text(active.at("version")), published_text(active), "-", "-"});
  return print_table(rows);
}

Status print_receivers(const Json& receivers) {
  if (receivers.empty()) return print_line("no receiver is connected");
  std::vector<Row> rows = {{"RECEIVER", "ADDRESS", "COMMITTED", "BEHIND", "FOR", "LAST ERROR"}};
  for (const Json& line : receivers) {
    const auto behind = line.at("versions_behind").get<std::uint64_t>();
    std::string error = line.at("last_error").get<std::string>();
    if (!line.at("connected").get<bool>())
      error = (line.value("lost", false) ? "lost " : "left ") + age_text(line.at("left_s")) + " ago";
    rows.push_back({line.at("name").get<std::string>(), line.at("address").get<std::string>(),
                    version_text(line.at("committed")), std::to_string(behind),
                    behind == 0 ? "-" : age_text(line.at("seconds_behind")), error.empty() ? "-" : error});
  }
  return print_table(rows);
}

Status print_agent(const Json& page) {
  DS_TRY(print_line("agent " + page.at("name").get<std::string>() + ", up " + age_text(page.at("uptime_s"))));
  const Standing standing = standing_of(page);
  DS_TRY(print_line(standing.found));
  if (!standing.remedy.empty()) DS_TRY(print_line("remedy: " + standing.remedy));
  DS_TRY(print_line(""));
  if (!page.at("active").is_null()) {
    DS_TRY(print_versions(page));
    DS_TRY(print_line(""));
  }
  return print_receivers(page.at("receivers"));
}

Status print_receiver(const Json& page) {
  const Json& versions = page.at("versions_behind");
  const auto error = page.at("last_error").get<std::string>();
  std::string newest = version_text(page.at("newest"));
  if (page.at("newest").is_null() && page.at("heard_newest").is_object()) {
    newest = version_text(page.at("heard_newest")) + ", heard " + age_text(page.at("heard_s")) + " ago";
  }
  DS_TRY(print_line(page.at("role").get<std::string>() + " from " + page.at("from").get<std::string>() + ", up " +
                    age_text(page.at("uptime_s"))));
  DS_TRY(print_line(""));
  return print_table(
      {{"HELD", "NEWEST", "BEHIND", "FOR", "LAST ERROR"},
       {version_text(page.at("held")), newest, versions.is_null() ? "unknown" : versions.dump(),
        versions.is_null() || versions == 0 ? "-" : age_text(page.at("seconds_behind")), error.empty() ? "-" : error}});
}

Status run_status(const StatusArgs& options) {
  DS_ASSIGN(const tools::HttpSource source, tools::parse_http_source(options.http, options.tls));
  DS_ASSIGN(const std::string body,
            tools::http_get(source, "/v1/status", after_seconds(options.deadline_s)).with_context(options.http));
  const Json page = Json::parse(body, nullptr, false);
  if (!page.is_object()) {
    return Error(Errc::protocol, options.http + ": no status page of deltasync; name the address of --http");
  }
  if (options.json) return print_json(page);
  try {
    return page.contains("role") ? print_receiver(page) : print_agent(page);
  } catch (const Json::exception& e) {
    return Error(Errc::protocol,
                 options.http + ": a status page of another release, or of another program: " + std::string(e.what()));
  }
}

}  // namespace

std::function<Status()> setup_status(CLI::App& app) {
  auto options = std::make_shared<StatusArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("--from,--http", options->http, "where the agent (or the receiver, or the relay) serves --http")
      ->required()
      ->type_name("[https://]HOST:PORT");
  add_tls_options(app, options->tls);
  app.add_option("--deadline-s", options->deadline_s, "time for the answer")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86'400.0));
  app.add_flag("--json", options->json, "the page as it is, on one line");
  return [options] { return run_status(*options); };
}

}  // namespace deltasync::cli
