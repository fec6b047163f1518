// The receiver process of e2e and tensors.
#include <cstdio>

#include "base/deadline.hpp"
#include "bench/processes.hpp"
#include "delta/delta.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::bench {
namespace {

constexpr auto kPullLimit = std::chrono::seconds(300);

void fail(const Error& error) {
  std::printf("%s\n", Json{{"error", error.to_string()}}.dump().c_str());
  std::fflush(stdout);
}

/// Root of what is really in the target's memory, read again after the commit.
Digest128 root_of_memory(const Receiver& receiver, const Target& target, ThreadPool& pool) {
  std::vector<std::uint64_t> digests(receiver.layout()->tile_count());
  delta::half_digests(*receiver.layout(), host_target_memory(target), digests, pool);
  return delta::root_digest(digests);
}

Status pull_versions(Receiver& receiver, unsigned count, ThreadPool& pool) {
  for (unsigned i = 0; i < count; ++i) {
    DS_ASSIGN(const auto staged, receiver.pull({.newer = true}, Deadline::after(kPullLimit)));
    const Stopwatch watch;
    DS_TRY(staged->commit());
    const double committed_at = monotonic_s();
    const double commit_s = watch.seconds();
    const PullReport& report = staged->report();
    const Json line{{"number", report.version.id.number},
                    {"mode", std::string(to_string(report.mode))},
                    {"committed_at", committed_at},
                    {"pull_s", report.transfer_s},
                    {"commit_s", commit_s},
                    {"wire_bytes", report.wire_bytes},
                    {"metadata_bytes", report.metadata_bytes},
                    {"changed", report.changed},
                    {"root", deltasync::to_string(root_of_memory(receiver, *receiver.target(), pool))}};
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
  return {};
}

}  // namespace

int receiver_main(const ReceiverArgs& args) {
  ThreadPool pool(args.threads, "check");
  ReceiverOptions options;
  options.endpoint = args.endpoint;
  options.streams = args.streams;
  options.threads = args.threads;
  options.name = "bench";
  options.local = false;  // as from another host
  receiver::Tuning tuning;
  tuning.compact = args.compact;
  if (args.compact)
    tuning.wait_slice = std::chrono::hours(1);  // the agent waits for the compact form at most half of it
  const Stopwatch watch;
  auto receiver = receiver::ReceiverImpl::connect(options, tuning, Deadline::after(kPullLimit));
  if (!receiver) return fail(receiver.error()), 1;
  const double connect_s = watch.seconds();
  if (auto bound = (*receiver)->bind(make_host_target((*receiver)->layout()), Deadline::after(kPullLimit)); !bound) {
    return fail(bound.error()), 1;
  }
  if (args.say_bound) {
    std::printf("%s\n", Json{{"connect_s", connect_s}}.dump().c_str());
    std::fflush(stdout);
  }
  if (auto pulled = pull_versions(**receiver, args.count, pool); !pulled) return fail(pulled.error()), 1;
  return 0;
}

}  // namespace deltasync::bench
