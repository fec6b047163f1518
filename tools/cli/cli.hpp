// What the subcommands of `deltasync` share: how they are registered, exit codes, output. cli.md is the manual.
#pragma once

#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <semaphore>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

#include "base/fd.hpp"
#include "base/process.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"

namespace deltasync::cli {

using Json = nlohmann::ordered_json;

/// Documented in cli.md and `--help`; scripts depend on them: never renumber.
enum class Exit : int {
  ok = 0,
  usage = 1,         ///< wrong options or arguments
  connection = 2,    ///< no agent there, or it went away, or it does not speak the protocol
  not_verified = 3,  ///< corrupt bytes: a hash, a digest or a structure is wrong; nothing was published
  deadline = 4,      ///< the deadline passed
  no_space = 5,      ///< disk, /dev/shm or cgroup full
  version = 6,       ///< the wanted version or layout does not exist (any more), or does not follow the last one
  access = 7,        ///< token missing or wrong, file permissions
  missing = 8,       ///< a file or directory is not there, or one is in the way
  unsupported = 9,   ///< well-formed, but unknown to this build (dtype, format version)
  other = 10,        ///< an operating-system error or a bug; the message has the details
};
Exit exit_of(Errc code) noexcept;
/// The table above for --help.
std::string exit_code_help();

/// One subcommand. `setup` declares options on `app` and returns what runs after parsing.
struct Command {
  const char* name;
  const char* summary;
  std::function<Status()> (*setup)(CLI::App& app);
};
std::function<Status()> setup_publish(CLI::App& app);
std::function<Status()> setup_pull(CLI::App& app);
std::function<Status()> setup_relay(CLI::App& app);
std::function<Status()> setup_status(CLI::App& app);
std::function<Status()> setup_inspect(CLI::App& app);
std::function<Status()> setup_diff(CLI::App& app);
std::function<Status()> setup_clean(CLI::App& app);
std::function<Status()> setup_trace(CLI::App& app);
std::function<Status()> setup_plan(CLI::App& app);
std::function<Status()> setup_export_plan(CLI::App& app);
std::function<Status()> setup_doctor(CLI::App& app);
std::function<Status()> setup_completion(CLI::App& app);
std::function<Status()> setup_bench(CLI::App& app);

/// Checks of an option that is a whole number, which CLI11 would let wrap: what is wrong with it, "" if nothing.
std::string not_negative(const std::string& number);
std::string one_or_more(const std::string& number);

/// --tls-ca, --tls-name, --tls-cert and --tls-key of a command that dials. `tls` outlives the app's parsing.
void add_tls_options(CLI::App& app, TlsOptions& tls);
/// --streams, --cores, --link-gbps and --local of a command that pulls; what is bound to them outlives the app's
/// parsing.
void add_transfer_options(CLI::App& app, unsigned& streams, std::string& cores, double& link_gbps,
                          std::optional<bool>& local);

/// Records a timeline while `work` goes on, named `process`, and writes it to `file` whatever came of it. With an empty
/// file, just works.
Status with_trace(const std::string& file, const std::string& process, const std::function<Status()>& work);

/// A model directory, or what is current in one that `pull --out` keeps.
std::filesystem::path model_directory(const std::string& path);

/// All of a small file. The errors name it.
Result<std::string> read_text(const std::string& path);

/// "NAME", "NAME[FIRST:END]" (rows), "NAME[ROWS][COLUMNS]". invalid_argument, or not_found; bind() checks the bounds.
Result<Slice> parse_slice(const Layout& layout, const std::string& text);

// ---- output --------------------------------------------------------------------------------------------------

/// One JSON object on stdout, flushed, on one line unless it is to be indented. A closed pipe is an error like any
/// other.
Status print_json(const Json& object, int indent = -1);
/// A line of text on stdout, flushed, as printable() has it: a terminal would do what control characters say.
Status print_line(std::string_view line);

/// "1.50 GiB", "312 B"
std::string human_bytes(std::uint64_t bytes);
/// "1.234 s", "56.7 ms", "89 us"
std::string human_seconds(double seconds);
/// The same, and from two minutes on "3 min", from two hours on "5 h".
std::string human_age(double seconds);
/// "12.3%"
std::string human_percent(double fraction);

/// A line that is rewritten in place on stderr, at most ten times a second and only if that is a terminal.
class Progress {
 public:
  explicit Progress(bool enabled);
  ~Progress();  ///< wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool enabled() const noexcept { return enabled_; }
  void show(const std::string& line);
  void clear();

 private:
  const bool enabled_;
  bool shown_ = false;
  double last_s_ = 0;
};

// ---- waiting and stopping ------------------------------------------------------------------------------------

/// SIGINT and SIGTERM ask long-running commands to stop after the version at hand; a second one kills.
void catch_stop_signals();
bool stop_requested() noexcept;

/// While it lives, the first SIGINT or SIGTERM requests a stop; a second one ends the process, as does the first one if
/// listening should fail. Make it before any other thread: threads inherit that these signals are blocked. The end of
/// the process `end_with`, if that is not 0, is as a SIGTERM; peer_died if it has ended already.
class StopOnSignal {
 public:
  static Result<std::unique_ptr<StopOnSignal>> make(pid_t end_with = 0);
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  std::stop_token token() const noexcept { return stop_.get_token(); }
  /// The signal that requested a stop from any object of this class; 0 if none has.
  static int received() noexcept;

 private:
  /// Of SIGINT and SIGTERM, as they were.
  struct Dispositions {
    sigset_t mask;
    struct sigaction actions[2];
    void restore() const noexcept;
  };

  StopOnSignal(UniqueFd signals, UniqueFd end, std::optional<ProcessWatch> end_with, const Dispositions& before);
  void listen();

  const UniqueFd signals_;
  const UniqueFd end_;  // an eventfd: listening is over
  const std::optional<ProcessWatch> end_with_;
  const Dispositions before_;
  std::stop_source stop_;
  std::binary_semaphore ended_{0};
  std::thread thread_;  // last: it uses all of the above
};

/// Waits until one of `fd` (−1: none) is readable, a stop signal, or `seconds` have passed. True if readable.
bool wait_readable(int fd, double seconds);

}  // namespace deltasync::cli
