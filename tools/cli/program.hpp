// What the programs `deltasync` and `deltasync-bench` do alike: common options, the log, and the way from an error to
// an exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "deltasync/result.hpp"

namespace deltasync::cli {

struct Program {
  CLI::App& app;
  std::string name;              ///< goes before an error
  std::function<Status()> work;  ///< what was asked for; called once the arguments are parsed
};

/// Parses, works, and says an error on stderr. Returns the exit code (Exit, or 128 + a signal).
int run_program(const Program& program, int argc, char** argv);

}  // namespace deltasync::cli
