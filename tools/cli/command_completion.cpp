// `deltasync completion SHELL`: a script that completes this command line.
#include <memory>
#include <sstream>

#include "tools/cli/cli.hpp"
#include "tools/cli/completion.hpp"

namespace deltasync::cli {
namespace {

Status run_completion(const std::string& shell, const CLI::App& program) {
  const CompletedCommand described = describe(program);
  std::istringstream script(shell == "bash"  ? bash_completion(described)
                            : shell == "zsh" ? zsh_completion(described)
                                             : fish_completion(described));
  for (std::string line; std::getline(script, line);) DS_TRY(print_line(line));
  return {};
}

}  // namespace

std::function<Status()> setup_completion(CLI::App& app) {
  auto shell = std::make_shared<std::string>();  // shared with the callbacks, which CLI11 copies
  app.add_option("SHELL", *shell, "try it: source <(deltasync completion bash)")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  return [shell, &app] { return run_completion(*shell, *app.get_parent()); };
}

}  // namespace deltasync::cli
