// What `pull` and `relay` have in common on the command line.
#include <map>
#include <string>

#include "tools/cli/cli.hpp"
#include "tools/cli/follow.hpp"

namespace deltasync::cli {

void add_on_older_epoch(CLI::App& app, OlderEpoch& policy) {
  static const std::map<std::string, OlderEpoch> kNames{
      {"follow", OlderEpoch::follow}, {"wait", OlderEpoch::wait}, {"fail", OlderEpoch::fail}};
  app.add_option_function<std::string>(
         "--on-older-epoch", [&policy](const std::string& name) { policy = kNames.at(name); },
         "what to do when the agent serves a trainer of an older epoch than what is held: follow it (default), "
         "wait for a later one, or fail")
      ->check(CLI::IsMember({"follow", "wait", "fail"}))
      ->option_text("follow|wait|fail");
}

}  // namespace deltasync::cli
