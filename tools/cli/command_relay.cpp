// `deltasync relay`: pulls every version once for a node, and writes it into the segment of the node's own agent, from
// which all receivers of the node pull.
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "base/call_context.hpp"
#include "base/cpu_affinity.hpp"
#include "base/deadline.hpp"
#include "base/log.hpp"
#include "deltasync/receiver.hpp"
#include "net/auth.hpp"
#include "net/blocking.hpp"
#include "net/endpoint.hpp"
#include "receiver/standing.hpp"
#include "receiver/targets/segment/relay.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/follow.hpp"
#include "tools/cli/receiver_pages.hpp"

namespace deltasync::cli {
namespace {

constexpr double kServedLimitS = 30;  ///< for the node's agent to diff a version
constexpr double kLookLimitS = 5;     ///< for it to say that it serves one which it has served before
constexpr auto kLookEvery = std::chrono::seconds(5);
constexpr auto kLookAfter = std::chrono::seconds(1);  ///< first the receivers of the node get the version
constexpr auto kPreferredEvery = std::chrono::seconds(10);
constexpr double kPreferredLimitS = 2;  ///< for an agent to answer that may be back
constexpr double kAttachSliceS = 10;    ///< after which a signal is heard, and a segment that is made by then is found

struct RelayArgs {
  std::string from;
  std::string agent;
  std::string advertise;
  std::string token_file;
  TlsOptions tls;
  unsigned streams = 4;
  unsigned threads = 0;
  std::string cores;
  double link_gbps = 0;
  std::optional<bool> local;
  std::uint64_t count = 0;
  pid_t end_with = 0;
  double deadline_s = 3600;
  double guard_s = 60;
  OlderEpoch on_older_epoch = OlderEpoch::follow;
  std::string trace;
  PagesOptions pages;
  bool json = false;
};

/// What it did so far.
struct Tally {
  std::uint64_t versions = 0;
  std::uint64_t full = 0;
  std::uint64_t wire_bytes = 0;
  std::uint64_t model_bytes = 0;  ///< as if each version had come whole
  Version newest;
};

class Relay {
 public:
  explicit Relay(const RelayArgs& options) : options_(options) {}

  Status run() {
    DS_ASSIGN(const auto on_signal, StopOnSignal::make(options_.end_with));
    DS_ASSIGN(const auto pages, ReceiverPages::start(options_.pages, "relay", options_.from, options_.tls));
    const Follower follower = watched(
        pages.get(), {options_.count, options_.deadline_s, [this](const CallContext& until) { return connect(until); },
                      [this](Receiver& receiver, const CallContext& until) { return take(receiver, until); },
                      [this](const PullReport& report) { return tell(report); }});
    Status ended = follow(follower, on_signal->token());
    DS_TRY(tell_end());
    return ended;
  }

 private:
  Result<std::unique_ptr<Receiver>> connect(const CallContext& until) {
    ReceiverOptions receiver_options;
    receiver_options.endpoint = options_.from;
    if (!options_.token_file.empty()) {
      DS_ASSIGN(receiver_options.token, net::read_token_file(options_.token_file));
    }
    receiver_options.tls = options_.tls;
    receiver_options.streams = options_.streams;
    receiver_options.link_gbps = options_.link_gbps;
    receiver_options.local = options_.local;
    receiver_options.on_older_epoch = options_.on_older_epoch;
    receiver_options.name = "deltasync relay";
    DS_ASSIGN(auto receiver, Receiver::connect(receiver_options, until));
    DS_TRY(look_for_agent(until));
    RelayTargetOptions target_options;
    target_options.agent_socket = options_.agent;
    target_options.threads = options_.threads;
    target_options.name = "deltasync relay";
    target_options.guard_limit =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(options_.guard_s));
    target_options.advertise = options_.advertise;
    target_options.pulled_from = receiver::agent_instance_of(*receiver);
    DS_ASSIGN(auto target, attach(*receiver, target_options, until));
    DS_TRY(receiver->bind(std::move(target), until));
    const std::size_t comma = options_.from.find(',');
    preferred_ = comma != std::string::npos && receiver::agent_instance_of(*receiver) == 0
                     ? options_.from.substr(0, comma)
                     : std::string();
    preferred_at_ = std::chrono::steady_clock::now();
    preferred_options_ = std::move(receiver_options);
    return receiver;
  }

  /// A receiver comes back to the agent that it prefers, but not one of several trainer nodes with parts of the model:
  /// that is another kind. layout_mismatch when it has to be made again, because the preferred one has the whole model,
  /// and none of an older trainer.
  Status look_for_preferred(const Receiver& receiver, const CallContext& until) {
    if (preferred_.empty() || std::chrono::steady_clock::now() - preferred_at_ < kPreferredEvery) return {};
    preferred_options_.endpoint = preferred_;
    const auto there = Receiver::connect(preferred_options_, until.earlier(after_seconds(kPreferredLimitS)));
    preferred_at_ = std::chrono::steady_clock::now();
    if (!there) return {};
    const auto held = receiver.current();
    const auto newest = (*there)->lag(until).newest;
    if (held && (!newest || newest->id.epoch < held->id.epoch)) return {};
    const std::string back = std::exchange(preferred_, {});
    if (receiver::agent_instance_of(**there) == 0) return {};  // one of the trainer nodes
    log::info("preferred_agent_back agent={}", back);
    return Error(Errc::layout_mismatch, "the agent at " + back + " has the whole model");
  }

  /// The writer hears no signal while it waits for an agent that has taken its connection and says nothing.
  static Result<std::unique_ptr<Target>> attach(const Receiver& receiver, const RelayTargetOptions& options,
                                                const CallContext& until) {
    for (;;) {
      const Deadline slice = until.deadline().earlier(after_seconds(kAttachSliceS));
      auto target = make_relay_target(receiver.layout(), receiver.sidecar(), options, slice);
      if (target.ok() || target.error().code() != Errc::timed_out || until.deadline().passed()) return target;
      DS_TRY(until.check("attaching to the agent on " + options.agent_socket));
    }
  }

  /// connection where nobody listens: attach() would wait for that, deaf to signals, and say nothing.
  Status look_for_agent(const CallContext& until) const {
    const auto connection = net::connect_unix(options_.agent, until);
    if (!connection) return Error(connection.error()).with_context("the agent on " + options_.agent);
    return {};
  }

  Result<PullReport> take(Receiver& receiver, const CallContext& until) {
    DS_ASSIGN(auto update, next(receiver, until));
    DS_TRY(update->commit().with_context("commit"));
    const auto sealed = std::chrono::steady_clock::now();
    look_at_served(receiver, kServedLimitS, until);
    served_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - sealed).count();
    return update->report();
  }

  /// While the trainer pauses, nobody but this relay sees that its node's agent has lost the version that it was
  /// served, or is gone. What was lost with its segment is the next version here: it comes whole.
  Result<std::unique_ptr<StagedUpdate>> next(Receiver& receiver, const CallContext& until) {
    Want want;
    want.newer = true;
    want.wait_max = kLookAfter;
    for (;;) {
      DS_TRY(look_for_preferred(receiver, until));
      if (std::chrono::steady_clock::now() - looked_at_ > kLookEvery && receiver.current()) {
        look_at_served(receiver, kLookLimitS, until);
        looked_at_ = std::chrono::steady_clock::now();
      }
      auto update = receiver.pull(want, until);
      if (update || update.error().code() != Errc::timed_out || until.over()) return update;
      looked_at_ = {};
      want.wait_max = kLookEvery;
    }
  }

  /// A version that is not served holds up no later one. Said when it begins, when it becomes another, and at its end.
  void look_at_served(Receiver& receiver, double limit_s, const CallContext& until) {
    const Status was = std::exchange(served_, receiver::wait_served(receiver, until.earlier(after_seconds(limit_s))));
    if (served_) {
      if (!was) log::info("relayed_version_served agent={}", options_.agent);
    } else if (served_.error().code() != Errc::cancelled && (was || was.error().code() != served_.error().code())) {
      log::warn("relayed_version_not_served agent={} error=\"{}\"", options_.agent, served_.error().to_string());
    }
  }

  Status tell(const PullReport& report) {
    ++tally_.versions;
    tally_.full += report.mode == PullMode::full ? 1 : 0;
    tally_.wire_bytes += report.wire_bytes;
    tally_.model_bytes += report.full_bytes;
    tally_.newest = report.version;
    if (options_.json) {
      return print_json({{"event", "relayed"},
                         {"mode", to_string(report.mode)},
                         {"id", to_string(report.version.id)},
                         {"number", report.version.id.number},
                         {"label", report.version.label},
                         {"root", to_string(report.root)},
                         {"served", served_.ok()},
                         {"wire_bytes", report.wire_bytes},
                         {"full_bytes", report.full_bytes},
                         {"metadata_bytes", report.metadata_bytes},
                         {"changed", report.changed},
                         {"delta_steps", report.delta_steps},
                         {"replans", report.replans},
                         {"wait_s", report.wait_s},
                         {"transfer_s", report.transfer_s},
                         {"commit_s", report.commit_s},
                         {"served_s", served_s_}});
    }
    return print_line(to_string(report.version) + ": " + std::string(to_string(report.mode)) + ", " +
                      human_bytes(report.wire_bytes) + " of " + human_bytes(report.full_bytes) + "; transfer " +
                      human_seconds(report.transfer_s) + ", commit " + human_seconds(report.commit_s) +
                      (served_ ? ", served after " + human_seconds(served_s_) : ", not served yet"));
  }

  Status tell_end() const {
    if (options_.json) {
      return print_json({{"event", "ended"},
                         {"versions", tally_.versions},
                         {"full", tally_.full},
                         {"id", tally_.versions == 0 ? "" : to_string(tally_.newest.id)},
                         {"wire_bytes", tally_.wire_bytes},
                         {"full_bytes", tally_.model_bytes}});
    }
    return print_line("relayed " + std::to_string(tally_.versions) + " versions, " + std::to_string(tally_.full) +
                      " of them whole: " + human_bytes(tally_.wire_bytes) + " for " + human_bytes(tally_.model_bytes));
  }

  const RelayArgs& options_;
  Tally tally_;
  Status served_;  ///< what was committed last
  double served_s_ = 0;
  std::chrono::steady_clock::time_point looked_at_;
  std::string preferred_;  ///< empty: it is in use, or nothing is known of it that would help
  std::chrono::steady_clock::time_point preferred_at_;  ///< when it was tried last
  ReceiverOptions preferred_options_;
};

Status run_relay(const RelayArgs& options) {
  DS_TRY(stay_on_cores(options.cores).with_context("--cores"));
  if (!options.advertise.empty()) {
    DS_ASSIGN(const net::Endpoint endpoint, net::parse_endpoint(options.advertise).with_context("--advertise"));
    if (endpoint.port == 0) return Error(Errc::invalid_argument, "--advertise " + options.advertise + " has no port");
  }
  return Relay(options).run();
}

}  // namespace

std::function<Status()> setup_relay(CLI::App& app) {
  auto options = std::make_shared<RelayArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("--from", options->from,
                 "the address of the agent that has the versions; several with commas between, the preferred one first")
      ->required()
      ->type_name("HOST:PORT");
  app.add_option("--agent", options->agent, "the Unix socket of this node's agent, which serves them on")
      ->required()
      ->type_name("SOCKET");
  app.add_option("--advertise", options->advertise,
                 "where others reach this node's agent: the agent at --from sends receivers there for which it has no "
                 "place (--children-max)")
      ->type_name("HOST:PORT");
  app.add_option("--token-file", options->token_file,
                 "file with the token shared with the agent at --from, readable by its owner only")
      ->type_name("FILE");
  add_tls_options(app, options->tls);
  add_transfer_options(app, options->streams, options->cores, options->link_gbps, options->local);
  app.add_option("--threads", options->threads, "that copy into the segment; 0 = up to 4")
      ->capture_default_str()
      ->check(CLI::Range(0, 256));
  app.add_option("--count", options->count, "end after this many versions")->check(one_or_more);
  app.add_option("--end-with", options->end_with, "end as by SIGTERM when the process of this pid has ended")
      ->check(CLI::PositiveNumber)
      ->type_name("PID");
  app.add_option("--deadline-s", options->deadline_s, "time for one version, the wait for it included")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 864'000.0));
  add_on_older_epoch(app, options->on_older_epoch);
  app.add_option("--guard-s", options->guard_s, "how long a version waits for a free half of the segment")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86'400.0));
  add_pages_options(app, options->pages);
  app.add_option("--trace", options->trace, "record a timeline, written to this file at the end")->type_name("FILE");
  app.add_flag("--json", options->json, "one JSON object a line");
  return [options] { return with_trace(options->trace, "relay", [&] { return run_relay(*options); }); };
}

}  // namespace deltasync::cli
