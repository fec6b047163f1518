// `deltasync doctor`: whether an agent can run here, or a receiver reach one, and what to do about what is wrong.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tools/cli/cli.hpp"
#include "tools/cli/doctor.hpp"

namespace deltasync::cli {
namespace {

struct DoctorArgs {
  AgentHost host;
  AgentToAsk agent;
  Access access;
  bool json = false;
};

Status print(const Finding& finding, bool json) {
  if (json) {
    return print_json({{"event", "checked"},
                       {"check", finding.check},
                       {"state", to_string(finding.state)},
                       {"found", finding.found},
                       {"remedy", finding.remedy}});
  }
  std::string line(to_string(finding.state));
  line.resize(9, ' ');
  line += finding.check;
  line.resize(std::max<std::size_t>(line.size(), 24), ' ');
  DS_TRY(print_line(line + finding.found));
  return finding.remedy.empty() ? Status() : print_line(std::string(24, ' ') + "remedy: " + finding.remedy);
}

/// An error with the code of the first finding that is one.
Status verdict(const std::vector<Finding>& findings) {
  const auto first = std::find_if(findings.begin(), findings.end(), is_error);
  if (first == findings.end()) return {};
  const auto errors = std::count_if(findings.begin(), findings.end(), is_error);
  return Error(first->code, std::to_string(errors) + " of " + std::to_string(findings.size()) + " checks failed");
}

Status run_doctor(DoctorArgs options) {
  options.host.access = options.agent.access = options.access;
  const bool receiver = !options.agent.from.empty() || !options.agent.pages.empty();
  const std::vector<Finding> findings = receiver ? check_agent(options.agent) : check_agent_host(options.host);
  for (const Finding& finding : findings) DS_TRY(print(finding, options.json));
  return verdict(findings);
}

}  // namespace

std::function<Status()> setup_doctor(CLI::App& app) {
  auto options = std::make_shared<DoctorArgs>();  // shared with the callbacks, which CLI11 copies
  const std::string host = "The host of an agent";
  const std::vector<CLI::Option*> of_host = {
      app.add_option("--model", options->host.model, "the model that is to be served, for what it needs")
          ->type_name("DIR"),
      app.add_option("--shm-dir", options->host.shm_dir, "as the agent has it")
          ->capture_default_str()
          ->type_name("DIR"),
      app.add_option("--name", options->host.name, "as the agent has it")->capture_default_str(),
      app.add_option("--listen", options->host.listen, "where it is to listen for receivers")->type_name("HOST:PORT"),
      app.add_option("--receivers-max", options->host.receivers_max, "as the agent has it")
          ->check(CLI::Range(1, 1 << 20)),
  };
  const std::vector<CLI::Option*> of_receiver = {
      app.add_option("--from", options->agent.from, "an agent that runs, as a receiver finds it: its --listen")
          ->type_name("HOST:PORT"),
      app.add_option("--http", options->agent.pages, "the same agent's pages, for its release")
          ->type_name("[https://]HOST:PORT"),
  };
  for (CLI::Option* option : of_host) {
    option->group(host);
    for (CLI::Option* other : of_receiver) option->excludes(other);
  }
  for (CLI::Option* option : of_receiver) option->group("A running agent");
  app.add_option("--token-file", options->access.token_file, "file with the shared token")->type_name("FILE");
  add_tls_options(app, options->access.tls);
  app.add_option("--deadline-s", options->agent.deadline_s, "time for each answer")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86'400.0));
  app.add_flag("--json", options->json, "one JSON object for each check");
  return [options] { return run_doctor(*options); };
}

}  // namespace deltasync::cli
