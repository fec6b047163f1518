// Completion scripts of shells, made from CLI11's own description of a program, so that they know what it knows.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace deltasync::cli {

/// What a shell completes an option's value, or an argument, with.
enum class Value : std::uint8_t { none, anything, file, directory, choice };

struct CompletedOption {
  std::vector<std::string> names;  ///< with dashes, as they are typed
  Value value = Value::none;
  std::vector<std::string> choices = {};
  bool repeated = false;
  std::string summary;
};
struct CompletedCommand {
  std::string name;
  std::string summary;
  std::vector<CompletedOption> options;
  Value argument = Value::none;  ///< of those that are no options
  std::vector<std::string> choices = {};
  std::vector<CompletedCommand> commands = {};
};
/// Of a program whose commands and options are all declared.
CompletedCommand describe(const CLI::App& app);

std::string bash_completion(const CompletedCommand& program);
std::string zsh_completion(const CompletedCommand& program);
std::string fish_completion(const CompletedCommand& program);

}  // namespace deltasync::cli
