// `deltasync pull`: a receiver that keeps a model directory, or slices in its memory.
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/call_context.hpp"
#include "base/cpu_affinity.hpp"
#include "deltasync/receiver.hpp"
#include "net/auth.hpp"
#include "receiver/targets/target.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/follow.hpp"
#include "tools/cli/receiver_pages.hpp"

namespace deltasync::cli {
namespace {

struct PullArgs {
  std::string from;
  std::string out;
  std::string token_file;
  TlsOptions tls;
  std::vector<std::string> tensors;
  std::optional<std::uint64_t> number;
  std::optional<std::string> label;
  unsigned streams = 4;
  std::string cores;
  double link_gbps = 0;
  std::optional<bool> local;
  std::optional<std::uint64_t> disk_reserve_mib;
  bool beside_model = false;
  unsigned keep_before = 1;
  std::uint64_t count = 0;
  std::optional<double> deadline_s;
  std::string trace;
  PagesOptions pages;
  OlderEpoch on_older_epoch = OlderEpoch::follow;
  bool follow = false;
  bool json = false;
};

double deadline_s(const PullArgs& options) {
  return options.deadline_s.value_or(options.follow ? 3600 : 60);
}

Want want_of(const PullArgs& options) {
  Want want;
  if (options.number) {
    want.number = *options.number;
  } else if (options.label) {
    want.label = *options.label;
  } else if (options.follow) {
    want.newer = true;
  }
  return want;
}

Status print(const PullArgs& options, const PullReport& report) {
  if (options.json) {
    return print_json({{"event", "pulled"},
                       {"mode", to_string(report.mode)},
                       {"id", to_string(report.version.id)},
                       {"number", report.version.id.number},
                       {"label", report.version.label},
                       {"out", options.out},
                       {"wire_bytes", report.wire_bytes},
                       {"local_bytes", report.local_bytes},
                       {"full_bytes", report.full_bytes},
                       {"metadata_bytes", report.metadata_bytes},
                       {"tiles", report.tiles},
                       {"changed", report.changed},
                       {"delta_steps", report.delta_steps},
                       {"replans", report.replans},
                       {"stream_restarts", report.stream_restarts},
                       {"repaired_tiles", report.repaired_tiles},
                       {"packed", report.packed},
                       {"transports", report.transports},
                       {"wait_s", report.wait_s},
                       {"transfer_s", report.transfer_s},
                       {"verify_s", report.verify_s},
                       {"commit_s", report.commit_s}});
  }
  std::string line = to_string(report.version) + ": " + std::string(to_string(report.mode));
  if (report.mode != PullMode::up_to_date) {
    line += ", " + human_bytes(report.wire_bytes) + " of " + human_bytes(report.full_bytes);
    if (report.full_bytes > 0) {
      line +=
          " (" + human_percent(static_cast<double>(report.wire_bytes) / static_cast<double>(report.full_bytes)) + ")";
    }
    if (!report.transports.empty()) line += ", by UCX over " + report.transports;
    if (report.local_bytes > 0) line += ", " + human_bytes(report.local_bytes) + " out of the agent's memory";
    line += "; transfer " + human_seconds(report.transfer_s) + ", commit " + human_seconds(report.commit_s);
  }
  return print_line(line);
}

Result<std::unique_ptr<Receiver>> connect(const PullArgs& options, const CallContext& until) {
  ReceiverOptions receiver_options;
  receiver_options.endpoint = options.from;
  if (!options.token_file.empty()) {
    DS_ASSIGN(receiver_options.token, net::read_token_file(options.token_file));
  }
  receiver_options.tls = options.tls;
  receiver_options.streams = options.streams;
  receiver_options.link_gbps = options.link_gbps;
  receiver_options.local = options.local;
  receiver_options.on_older_epoch = options.on_older_epoch;
  receiver_options.name = "deltasync pull";
  DS_ASSIGN(auto receiver, Receiver::connect(receiver_options, until));
  std::vector<Slice> slices;
  for (const std::string& text : options.tensors) {
    DS_ASSIGN(Slice slice, parse_slice(*receiver->layout(), text));
    slices.push_back(std::move(slice));
  }
  std::unique_ptr<Target> target;
  if (options.out.empty()) {
    target = make_host_target(receiver->layout());
  } else {
    HfTargetOptions hf;
    hf.beside_model = options.beside_model;
    hf.keep_before = options.keep_before;
    if (options.disk_reserve_mib) hf.disk_reserve_bytes = *options.disk_reserve_mib << 20;
    DS_ASSIGN(target, make_hf_target(receiver->layout(), receiver->sidecar(), options.out, hf));
  }
  Status bound = receiver->bind(std::move(target), slices, until);
  if (!bound)
    return options.out.empty() ? std::move(bound).error() : std::move(bound).error().with_context(options.out);
  return receiver;
}

/// While it lives, a line on the terminal says how far the pull is.
class PullProgress {
 public:
  PullProgress(const Receiver& receiver, bool enabled, bool waits) : line_(enabled) {
    if (!line_.enabled()) return;
    if (waits) line_.show("waiting for a newer version …");
    shower_ = std::jthread([this, &receiver](const std::stop_token& stop) { show(receiver, stop); });
  }

 private:
  void show(const Receiver& receiver, const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    const auto begin = std::chrono::steady_clock::now();
    while (!stopped.wait_for(lock, stop, std::chrono::milliseconds(200), [&stop] { return stop.stop_requested(); })) {
      const auto [done, total] = receiver.progress();
      if (total == 0) continue;
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      line_.show(human_bytes(done) + " of " + human_bytes(total) + " (" +
                 human_percent(static_cast<double>(done) / static_cast<double>(total)) + ") in " +
                 human_seconds(seconds));
    }
  }

  Progress line_;
  std::jthread shower_;  // last: it uses the line, and has ended before that is wiped
};

Result<PullReport> pull_one(const PullArgs& options, Receiver& receiver, const Want& want, const CallContext& until) {
  std::optional<PullProgress> progress(std::in_place, receiver, !options.json, options.follow);
  DS_ASSIGN(auto update, receiver.pull(want, until));
  progress.reset();
  // Who follows waits for versions: how long one took to come leaves its commit no less time.
  const Deadline limit = options.follow ? after_seconds(deadline_s(options)) : until.deadline();
  if (update->report().mode != PullMode::up_to_date) DS_TRY(update->commit(limit).with_context("commit"));
  return update->report();
}

Status run_pull(const PullArgs& options) {
  DS_TRY(stay_on_cores(options.cores).with_context("--cores"));
  DS_ASSIGN(const auto on_signal, StopOnSignal::make());
  const Want want = want_of(options);
  if (options.follow) {
    DS_ASSIGN(const auto pages, ReceiverPages::start(options.pages, "pull", options.from, options.tls));
    const Follower follower =
        watched(pages.get(),
                {options.count, deadline_s(options), [&](const CallContext& until) { return connect(options, until); },
                 [&](Receiver& from, const CallContext& until) { return pull_one(options, from, want, until); },
                 [&](const PullReport& report) { return print(options, report); }});
    return follow(follower, on_signal->token());
  }
  const CallContext until(after_seconds(deadline_s(options)), on_signal->token());
  DS_ASSIGN(auto receiver, connect(options, until));
  DS_ASSIGN(const PullReport report, pull_one(options, *receiver, want, until));
  return print(options, report);
}

}  // namespace

std::function<Status()> setup_pull(CLI::App& app) {
  auto options = std::make_shared<PullArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("--from", options->from,
                 "the agent's address, or several with commas between: of the first that answers")
      ->required()
      ->type_name("HOST:PORT");
  auto* out = app.add_option("--out", options->out,
                             "directory that keeps the versions; DIR/current is the newest committed one")
                  ->type_name("DIR");
  auto* tensors = app.add_option("--tensor", options->tensors,
                                 "only this tensor, or rows and columns of it, kept in memory until the end; may be "
                                 "repeated")
                      ->type_name("NAME[ROWS][COLUMNS]");
  out->excludes(tensors);
  app.parse_complete_callback([out, tensors] {
    if (out->count() == 0 && tensors->count() == 0) throw CLI::RequiredError("--out or --tensor");
  });
  app.add_option("--token-file", options->token_file, "file with the shared token, readable by its owner only")
      ->type_name("FILE");
  add_tls_options(app, options->tls);
  add_transfer_options(app, options->streams, options->cores, options->link_gbps, options->local);
  app.add_option("--disk-reserve-mib", options->disk_reserve_mib,
                 "what stays free on the disk of --out (default: 5 % of it, 1 GiB at most)")
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1} << 40));
  app.add_flag("--beside-model", options->beside_model,
               "--out may hold a model of somebody else: versions go beside it")
      ->needs(out);
  app.add_option("--keep-before", options->keep_before,
                 "how many versions before the newest stay, for hosts that load them over NFS")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000))
      ->needs(out);
  auto* number =
      app.add_option("--number", options->number, "the version with this number, waited for")->check(not_negative);
  auto* label = app.add_option("--label", options->label, "the version with this label, waited for");
  auto* follow = app.add_flag("--follow", options->follow, "go on with every newer version until stopped");
  number->excludes(label)->excludes(follow);
  label->excludes(follow);
  app.add_option("--count", options->count, "with --follow: end after this many versions")
      ->needs(follow)
      ->check(one_or_more);
  add_on_older_epoch(app, options->on_older_epoch);
  app.add_option("--deadline-s", options->deadline_s,
                 "time for one version, the wait for it included (default 60; 3600 with --follow)")
      ->check(CLI::Range(0.001, 864'000.0));
  add_pages_options(app, options->pages);
  app.get_option("--http")->needs(follow);
  app.add_option("--trace", options->trace, "record a timeline, written to this file at the end")->type_name("FILE");
  app.add_flag("--json", options->json, "one JSON object a line");
  return [options] { return with_trace(options->trace, "pull", [&] { return run_pull(*options); }); };
}

}  // namespace deltasync::cli
