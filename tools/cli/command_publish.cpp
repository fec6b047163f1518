// `deltasync publish`: a trainer made of model directories.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.hpp"
#include "base/label.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"
#include "deltasync/writer.hpp"
#include "net/blocking.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

constexpr double kAgentLookS = 0.1;  ///< between two looks whether an agent listens

struct PublishArgs {
  std::vector<std::string> models;
  std::string agent;
  std::string label_prefix;
  std::uint64_t tensor_parallel = 1;
  std::uint64_t interval_ms = 0;
  unsigned threads = 0;
  double deadline_s = 120;
  std::string trace;
  bool step_on_stdin = false;
  bool json = false;
};

Deadline deadline_of(const PublishArgs& options) {
  return Deadline::after(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(options.deadline_s)));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

enum class Go : std::uint8_t { next, end };

/// Keeps the attachment to the agent over versions of one layout.
class Publisher {
 public:
  explicit Publisher(const PublishArgs& options) : options_(options) {}

  /// Whether each version's label can be one.
  Status check_labels() const {
    for (std::size_t i = 0; i < options_.models.size(); ++i) {
      const Version version{{1, i + 1}, label_of(options_.models[i], i + 1)};
      DS_TRY(check_no_other_number(version).with_context(options_.models[i] + " (--label-prefix gives other labels)"));
    }
    return {};
  }

  /// end: a stop signal came before there was an agent; nothing was published.
  Result<Go> publish(const std::string& dir, std::uint64_t number) {
    DS_ASSIGN(const HfModel model, HfModel::open(dir, options_.tensor_parallel));
    const Deadline deadline = deadline_of(options_);
    DS_ASSIGN(const Go go, attach(model, deadline));
    if (go == Go::end) return go;

    const Version version{{epoch_, number}, label_of(dir, number)};
    DS_ASSIGN(const OffloadReport report, offload(model, version, deadline));
    const auto sealed = std::chrono::steady_clock::now();
    DS_TRY(writer_->wait_ready(version.id, deadline).with_context("waiting until the agent serves it"));
    DS_TRY(print(report, dir, seconds_since(sealed)));
    return Go::next;
  }

 private:
  std::string label_of(const std::string& dir, std::uint64_t number) const {
    if (!options_.label_prefix.empty()) return options_.label_prefix + std::to_string(number);
    auto path = std::filesystem::path(dir).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();  // "model/"
    return path.filename().string();
  }

  /// A model of another layout, or with other side files, attaches again: the agent makes a new generation of it.
  Result<Go> attach(const HfModel& model, Deadline deadline) {
    auto sidecar = model.sidecar().encode();
    if (writer_ && writer_->layout()->digest() == model.layout()->digest() && sidecar == sidecar_) return Go::next;
    writer_.reset();
    WriterOptions options;
    options.agent_socket = options_.agent;
    options.threads = options_.threads;
    options.name = "deltasync publish";
    Progress progress(!options_.json);
    progress.show("waiting for the agent on " + options_.agent);
    // Writer::attach waits as well, but hears no signal.
    while (nobody_listens(deadline)) {
      wait_readable(-1, std::min(kAgentLookS, std::chrono::duration<double>(deadline.remaining()).count()));
      if (stop_requested()) return Go::end;
    }
    DS_ASSIGN(writer_, Writer::attach(model.layout(), model.sidecar(), options, deadline));
    if (epoch_ == 0) epoch_ = writer_->fresh_epoch();
    sidecar_ = std::move(sidecar);
    return Go::next;
  }

  bool nobody_listens(Deadline deadline) const {
    const auto connection = net::connect_unix(options_.agent, deadline);
    return !connection && connection.error().code() == Errc::connection && !deadline.passed();
  }

  Result<OffloadReport> offload(const HfModel& model, const Version& version, Deadline deadline) {
    DS_TRY(writer_->begin(version, deadline));
    Progress progress(!options_.json);
    const auto tensors = model.layout()->tensors();
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < tensors.size(); ++i) {
      Source source;
      source.data = model.tensor(i).data();
      if (auto status = writer_->write(i, source); !status) {
        writer_->abort();
        return std::move(status).error();
      }
      bytes += tensors[i].bytes;
      progress.show(version.label + ": " + human_bytes(bytes) + " of " + human_bytes(model.layout()->model_bytes()));
    }
    return writer_->commit(deadline);
  }

  Status print(const OffloadReport& report, const std::string& dir, double ready_s) {
    if (options_.json) {
      return print_json({{"event", "published"},
                         {"id", to_string(report.version.id)},
                         {"number", report.version.id.number},
                         {"label", report.version.label},
                         {"model", dir},
                         {"bytes", report.bytes},
                         {"tensors", report.tensors},
                         {"guard_s", report.guard_s},
                         {"copy_s", report.copy_s},
                         {"seal_s", report.seal_s},
                         {"total_s", report.total_s},
                         {"ready_s", ready_s}});
    }
    return print_line(to_string(report.version) + ": " + human_bytes(report.bytes) + " in " +
                      std::to_string(report.tensors) + " tensors; guard " + human_seconds(report.guard_s) + ", copy " +
                      human_seconds(report.copy_s) + ", seal " + human_seconds(report.seal_s) + ", served after " +
                      human_seconds(ready_s));
  }

  const PublishArgs& options_;
  std::uint64_t epoch_ = 0;  ///< of the whole run; 0: it has met no agent yet
  std::unique_ptr<Writer> writer_;
  std::vector<std::byte> sidecar_;
};

/// Waits for one line on stdin. End of input or a stop signal ends the publishing.
Result<Go> wait_for_line(double seconds) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    if (!wait_readable(STDIN_FILENO, seconds - seconds_since(start))) {
      if (stop_requested()) return Go::end;
      return Error(Errc::timed_out, "no line on stdin for " + human_seconds(seconds));
    }
    char c = 0;
    const auto n = ::read(STDIN_FILENO, &c, 1);
    if (n < 0 && errno != EINTR) return Error::from_errno("stdin", errno);
    if (n == 0) return Go::end;
    if (n == 1 && c == '\n') return Go::next;
  }
}

Result<Go> wait_for_turn(const PublishArgs& options, bool first) {
  if (options.step_on_stdin) return wait_for_line(options.deadline_s);
  if (!first && options.interval_ms > 0) wait_readable(-1, static_cast<double>(options.interval_ms) / 1000);
  return stop_requested() ? Go::end : Go::next;
}

Status run_publish(const PublishArgs& options) {
  catch_stop_signals();
  Publisher publisher(options);
  DS_TRY(publisher.check_labels());
  std::uint64_t number = 0;
  for (const std::string& dir : options.models) {
    DS_ASSIGN(const Go go, wait_for_turn(options, number == 0));
    if (go == Go::end) return {};
    ++number;
    auto published = publisher.publish(dir, number);
    if (!published) {
      return std::move(published).error().with_context("version " + std::to_string(number) + " from " + dir);
    }
    if (*published == Go::end) return {};
  }
  return {};
}

}  // namespace

std::function<Status()> setup_publish(CLI::App& app) {
  auto options = std::make_shared<PublishArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("--model", options->models, "model directories; each is the next version")
      ->required()
      ->expected(1, -1)
      ->type_name("DIR...");
  app.add_option("--agent", options->agent, "the agent's Unix socket")->required()->type_name("SOCKET");
  app.add_option("--tp", options->tensor_parallel, "cut tensors so that this many ranks get whole tiles")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--interval-ms", options->interval_ms, "pause between versions")
      ->capture_default_str()
      ->check(CLI::Range(0, 86'400'000));
  app.add_option("--label-prefix", options->label_prefix,
                 "label versions PREFIX1, PREFIX2 … (default: directory names)")
      ->type_name("PREFIX");
  app.add_option("--threads", options->threads, "copy threads; 0 = up to 4")
      ->capture_default_str()
      ->check(CLI::Range(0, 256));
  app.add_option("--deadline-s", options->deadline_s,
                 "time for one version, from its start (waiting for the agent included) until it is served")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86'400.0));
  app.add_flag("--step-on-stdin", options->step_on_stdin, "publish one version for each line on stdin");
  app.add_option("--trace", options->trace, "record a timeline, written to this file at the end")->type_name("FILE");
  app.add_flag("--json", options->json, "one JSON object a line");
  return [options] { return with_trace(options->trace, "publish", [&] { return run_publish(*options); }); };
}

}  // namespace deltasync::cli
