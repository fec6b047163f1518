#include "tools/cli/completion.hpp"

#include <algorithm>

namespace deltasync::cli {
namespace {

/// "a,b" of "TEXT:{a,b}", which is how CLI11 says what IsMember accepts.
std::vector<std::string> choices_in(const std::string& type) {
  const auto begin = type.find('{');
  const auto end = type.find('}', begin);
  if (begin == std::string::npos || end == std::string::npos) return {};
  return CLI::detail::split(type.substr(begin + 1, end - begin - 1), ',');
}

Value value_of(const std::string& type, bool has_choices) {
  if (has_choices) return Value::choice;
  if (type == "FILE" || type == "SOCKET") return Value::file;
  if (type == "DIR" || type == "DIR...") return Value::directory;
  return Value::anything;
}

CompletedOption describe(const CLI::Option& option) {
  CompletedOption out;
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  out.repeated = option.get_items_expected_max() > 1;
  out.summary = option.get_description();
  if (option.get_items_expected_max() == 0) return out;
  out.choices = choices_in(option.get_type_name());
  out.value = value_of(option.get_type_name(), !out.choices.empty());
  return out;
}

/// `text` with a backslash before each of `special`.
std::string escaped(std::string_view text, std::string_view special) {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
  return CLI::detail::join(words, between);
}

std::vector<std::string> names_of(const CompletedCommand& command) {
  std::vector<std::string> names;
  for (const CompletedOption& option : command.options)
    names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

std::vector<std::string> command_names(const CompletedCommand& program) {
  std::vector<std::string> names;
  for (const CompletedCommand& command : program.commands) names.push_back(command.name);
  return names;
}

// ---- bash ----------------------------------------------------------------------------------------------------

/// What fills COMPREPLY with a value.
std::string bash_fill(Value value, const std::vector<std::string>& choices) {
  switch (value) {
    case Value::choice: return "mapfile -t COMPREPLY < <(compgen -W '" + joined(choices) + "' -- \"$cur\")";
    case Value::directory: return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$cur\")";
    case Value::file: return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")";
    case Value::none:
    case Value::anything: break;
  }
  return ":";
}

std::string bash_values(const CompletedCommand& command, const std::string& name) {
  std::string out;
  for (const CompletedOption& option : command.options) {
    if (option.value == Value::none) continue;
    std::vector<std::string> patterns;
    for (const std::string& typed : option.names) patterns.push_back("'" + name + " " + typed + "'");
    out += "    " + joined(patterns, "|") + ") " + bash_fill(option.value, option.choices) + "; return ;;\n";
  }
  return out;
}

/// Which words there are where no value is due. What begins without a dash is a command or an argument.
std::string bash_words(const CompletedCommand& command, const std::string& name) {
  std::vector<std::string> words = names_of(command);
  for (const std::string& sub : command_names(command)) words.push_back(sub);
  std::string out = "    '" + name + "') words='" + joined(words) + "'";
  if (command.commands.empty())
    out += "; [[ $cur == -* ]] || { " + bash_fill(command.argument, command.choices) + "; return; }";
  return out + " ;;\n";
}

// ---- zsh -----------------------------------------------------------------------------------------------------

std::string zsh_action(Value value, const std::vector<std::string>& choices) {
  switch (value) {
    case Value::choice: return "(" + joined(choices) + ")";
    case Value::directory: return "_files -/";
    case Value::file: return "_files";
    case Value::none:
    case Value::anything: break;
  }
  return "";
}

std::string in_quotes(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return "'" + out + "'";
}

/// The specifications of _arguments for a command's options, one a line.
std::string zsh_options(const CompletedCommand& command, const std::string& indent) {
  std::string out;
  for (const CompletedOption& option : command.options) {
    for (const std::string& name : option.names) {
      const char* const joins = option.value != Value::none && name.starts_with("--") ? "=" : "";
      std::string spec = (option.repeated ? "*" : "") + name + joins + "[" + escaped(option.summary, "[]:\\") + "]";
      if (option.value != Value::none) spec += ":value:" + zsh_action(option.value, option.choices);
      out += " \\\n" + indent + in_quotes(spec);
    }
  }
  if (command.argument != Value::none)
    out += " \\\n" + indent + in_quotes("*:argument:" + zsh_action(command.argument, command.choices));
  return out;
}

// ---- fish ----------------------------------------------------------------------------------------------------

std::string fish_quoted(const std::string& text) {
  return "'" + escaped(text, "'\\") + "'";
}

std::string fish_value(Value value, const std::vector<std::string>& choices) {
  switch (value) {
    case Value::choice: return " -x -a " + fish_quoted(joined(choices));
    case Value::directory: return " -x -a '(__fish_complete_directories)'";
    case Value::file: return " -r -F";
    case Value::anything: return " -x";
    case Value::none: break;
  }
  return "";
}

std::string fish_command(const std::string& program, const CompletedCommand& command, const std::string& condition) {
  std::string out;
  const std::string line = "complete -c " + program + " -n " + fish_quoted(condition);
  for (const CompletedOption& option : command.options) {
    out += line;
    for (const std::string& name : option.names)
      out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    out += fish_value(option.value, option.choices) + " -d " + fish_quoted(option.summary) + "\n";
  }
  if (command.argument == Value::file || command.argument == Value::directory) out += line + " -F\n";
  if (command.argument == Value::choice) out += line + " -f -a " + fish_quoted(joined(command.choices)) + "\n";
  return out;
}

}  // namespace

CompletedCommand describe(const CLI::App& app) {
  CompletedCommand out;
  out.name = app.get_name();
  out.summary = app.get_description();
  for (const CLI::Option* option : app.get_options()) {
    if (option->nonpositional()) {
      out.options.push_back(describe(*option));
      const CompletedOption& last = out.options.back();
      if (last.repeated && last.value == Value::directory) out.argument = last.value;  // its second, third …
    } else {  // files of all kinds, unless it is a choice
      out.choices = choices_in(option->get_type_name());
      out.argument = out.choices.empty() ? Value::file : Value::choice;
    }
  }
  const auto all = [](const CLI::App*) { return true; };
  for (const CLI::App* sub : app.get_subcommands(all)) out.commands.push_back(describe(*sub));
  return out;
}

std::string bash_completion(const CompletedCommand& program) {
  const std::string function = "_" + program.name;
  std::string out = "# bash completion of " + program.name + "\n" + function +
                    "() {\n"
                    "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} command='' words='' i\n"
                    "  COMPREPLY=()\n"
                    "  [[ $prev != = ]] || prev=${COMP_WORDS[COMP_CWORD - 2]}\n"  // --option=value is three words
                    "  [[ $cur != = ]] || cur=''\n"
                    "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
                    "    case ${COMP_WORDS[i]} in\n"
                    "    " +
                    joined(command_names(program), "|") +
                    ") command=${COMP_WORDS[i]}; break ;;\n"
                    "    esac\n"
                    "  done\n"
                    "  case \"$command $prev\" in\n" +
                    bash_values(program, "");
  for (const CompletedCommand& command : program.commands) out += bash_values(command, command.name);
  out += "  esac\n  case $command in\n" + bash_words(program, "");
  for (const CompletedCommand& command : program.commands) out += bash_words(command, command.name);
  return out + "  esac\n  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n}\ncomplete -F " + function +
         " " + program.name + "\n";
}

std::string zsh_completion(const CompletedCommand& program) {
  const std::string function = "_" + program.name;
  std::string out = "#compdef " + program.name + "\n" + function +
                    "() {\n"
                    "  local context state state_descr line\n"
                    "  typeset -A opt_args\n"
                    "  _arguments -C" +
                    zsh_options(program, "    ") +
                    " \\\n    '1:command:->command' '*::argument:->argument'\n"
                    "  case $state in\n"
                    "  command)\n"
                    "    local -a commands=(";
  for (const CompletedCommand& command : program.commands)
    out += "\n      " + in_quotes(command.name + ":" + escaped(command.summary, ":\\"));
  out += ")\n    _describe command commands ;;\n  argument)\n    case $words[1] in\n";
  for (const CompletedCommand& command : program.commands) {
    const std::string options = zsh_options(command, "      ");
    out += "    " + command.name + ") " + (options.empty() ? "_default" : "_arguments" + options) + " ;;\n";
  }
  return out +
         "    esac ;;\n  esac\n}\n"
         "if [[ $funcstack[1] == " +
         function + " ]]; then\n  " + function + " \"$@\"\nelse\n  compdef " + function + " " + program.name + "\nfi\n";
}

std::string fish_completion(const CompletedCommand& program) {
  std::string out = "# fish completion of " + program.name + "\ncomplete -c " + program.name + " -f\n";
  // __fish_use_subcommand takes the value of an option before the command for the command.
  const std::string none = "not __fish_seen_subcommand_from " + joined(command_names(program));
  for (const CompletedCommand& command : program.commands) {
    out += "complete -c " + program.name + " -n " + fish_quoted(none) + " -a " + command.name + " -d " +
           fish_quoted(command.summary) + "\n";
  }
  out += fish_command(program.name, program, none);
  for (const CompletedCommand& command : program.commands)
    out += fish_command(program.name, command, "__fish_seen_subcommand_from " + command.name);
  return out;
}

}  // namespace deltasync::cli
