// deltasync bench: the benchmarks are a program of their own, so that who does not want them need not build them.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

constexpr const char* kProgram = "deltasync-bench";

/// What Python generates with is measured by the package: `python -m deltasync.bench`, of the interpreter that has it.
Status exec_python(const CLI::App& app) {
  const char* const chosen = std::getenv("DELTASYNC_PYTHON");
  std::string program = chosen != nullptr ? chosen : "python3";
  std::vector<std::string> args{program, "-m", "deltasync.bench"};
  for (const std::string& arg : app.remaining()) args.push_back(arg);
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  ::execvp(program.c_str(), argv.data());
  return Error::from_errno(program, errno);
}

Status exec_bench(const CLI::App& app) {
  const std::vector<std::string> asked = app.remaining();
  if (!asked.empty() && asked.front() == "control") return exec_python(app);
  std::error_code failed;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", failed);
  const std::string program = (failed ? std::filesystem::path(kProgram) : own.parent_path() / kProgram).string();
  std::vector<std::string> args{kProgram};
  for (const char* option : {"--log-level", "--log-format"}) {
    const CLI::Option& given = *app.get_parent()->get_option(option);
    if (given.count() > 0) args.insert(args.end(), {option, given.as<std::string>()});
  }
  for (const std::string& arg : app.remaining()) args.push_back(arg);
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  ::execv(program.c_str(), argv.data());
  if (errno != ENOENT) return Error::from_errno(program, errno);
  return Error(Errc::not_found, "the benchmarks are a program of their own, " + program +
                                    ", which is not there: build the target " + kProgram);
}

}  // namespace

std::function<Status()> setup_bench(CLI::App& app) {
  app.prefix_command();
  app.set_help_flag();  // that program has its own
  return [&app] { return exec_bench(app); };
}

}  // namespace deltasync::cli
