// bench colocated: a receiver on the agent's host, by the agent's memory and by the connection in one run, against one
// copy of the model. Each full update is of a receiver that holds nothing, the mapping included; then each of two
// receivers takes every delta, in turns the first.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "bench/case_buckets.hpp"
#include "bench/end_to_end.hpp"
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "deltasync/receiver.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::bench {
namespace {

/// One way for the bytes to come.
struct Way {
  bool local = false;
  Buffer memory;
  std::unique_ptr<Receiver> receiver{};
  std::vector<double> full_s{};
  std::vector<double> delta_s{};
  PullReport full{};
  PullReport delta{};
};

Status connect(const Options& options, const BenchAgent& agent, const LayoutPtr& layout, Way& way) {
  ReceiverOptions receiver_options;
  receiver_options.endpoint = agent.endpoint();
  receiver_options.streams = options.streams;
  receiver_options.threads = options.threads;
  receiver_options.local = way.local;
  way.receiver.reset();
  DS_ASSIGN(way.receiver, Receiver::connect(receiver_options, Deadline::after(kCaseLimit)));
  return way.receiver->bind(make_host_target(layout, way.memory.span()), Deadline::after(kCaseLimit));
}

/// Pulls, commits and compares; seconds of the first two.
Result<double> take(Way& way, PullMode mode, ByteSpan source) {
  const Stopwatch watch;
  DS_ASSIGN(const auto staged, way.receiver->pull({}, Deadline::after(kCaseLimit)));
  DS_TRY(staged->commit());
  const double seconds = watch.seconds();
  (mode == PullMode::full ? way.full : way.delta) = staged->report();
  if (staged->report().mode != mode) {
    return Error(Errc::internal, "an update was " + std::string(to_string(staged->report().mode)) + ", not " +
                                     std::string(to_string(mode)));
  }
  if (!std::equal(source.begin(), source.end(), way.memory.span().begin())) {
    return Error(Errc::corrupt, "the pulled version differs from the published one");
  }
  return seconds;
}

Result<Json> run_agent_beside(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  std::fill(source.span().begin(), source.span().end(), std::byte{0});
  SyntheticModel model(layout, options.density, options.seed, pool);
  model.write_half(source.span());
  std::vector<Way> ways;
  for (const bool local : {true, false}) {
    DS_ASSIGN(Buffer memory, Buffer::allocate(layout->half_bytes(), pool));
    ways.push_back({local, std::move(memory)});
  }
  Way& by_memory = ways[0];
  Way& by_connection = ways[1];
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, source.span(), options.threads));
  DS_TRY(trainer.publish());

  std::vector<double> copy_s;
  const unsigned rounds = rounds_of(options);
  const auto in_turns = [&](unsigned round, auto&& work) -> Status {
    for (unsigned i = 0; i < ways.size(); ++i) DS_TRY(work(ways[(round + i) % ways.size()]));
    copy_s.push_back(copy_once(by_connection.memory.span(), source.span(), pool));  // the very bytes that are there
    return {};
  };
  const auto take_full = [&](Way& way) -> Status {
    DS_TRY(connect(options, agent, layout, way));
    DS_ASSIGN(const double seconds, take(way, PullMode::full, source.span()));
    way.full_s.push_back(seconds);
    return {};
  };
  const auto take_delta = [&](Way& way) -> Status {
    DS_ASSIGN(const double seconds, take(way, PullMode::delta, source.span()));
    way.delta_s.push_back(seconds);
    return {};
  };
  for (unsigned round = 0; round < rounds; ++round) DS_TRY(in_turns(round, take_full));
  for (unsigned round = 0; round < rounds; ++round) {
    model.step();
    model.write_half(source.span());
    DS_TRY(trainer.publish());
    DS_TRY(in_turns(round, take_delta));
  }
  const auto best = [](const std::vector<double>& seconds) {
    return *std::min_element(seconds.begin(), seconds.end());
  };
  const double copy = best(copy_s);
  return Json{{"memcpy_s", copy},
              {"full_s", best(by_memory.full_s)},
              {"tcp_full_s", best(by_connection.full_s)},
              {"delta_s", best(by_memory.delta_s)},
              {"tcp_delta_s", best(by_connection.delta_s)},
              {"full_ratio_to_memcpy", best(by_memory.full_s) / copy},
              {"tcp_full_ratio_to_memcpy", best(by_connection.full_s) / copy},
              {"delta_ratio_to_memcpy", best(by_memory.delta_s) / copy},
              {"tcp_delta_ratio_to_memcpy", best(by_connection.delta_s) / copy},
              {"local_bytes", by_memory.full.local_bytes},
              {"wire_bytes", by_memory.full.wire_bytes},
              {"tcp_wire_bytes", by_connection.full.wire_bytes},
              {"delta_wire_bytes", by_memory.delta.wire_bytes},
              {"changed", by_memory.delta.changed}};
}

}  // namespace

Result<Json> run_colocated(const Options& options) {
  DS_ASSIGN(Json found, run_agent_beside(options));
  DS_ASSIGN(const Json buckets, run_buckets(options));
  found.update(buckets);
  return found;
}

}  // namespace deltasync::bench
