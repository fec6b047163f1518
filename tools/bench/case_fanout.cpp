// bench fanout: one agent with more and more receivers, all real processes.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "bench/end_to_end.hpp"
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "bench/transfers.hpp"

namespace deltasync::bench {
namespace {

/// One agent, and as many receivers as are given.
class FannedOut {
 public:
  static Result<FannedOut> start(const Options& options, const LayoutPtr& layout, ByteSpan half, unsigned receivers) {
    Options one = options;
    one.threads = one.streams = 1;  // of a receiver
    DS_ASSIGN(BenchAgent agent, BenchAgent::start(options));
    DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, half, options.threads));
    FannedOut made(std::move(agent), std::move(trainer));
    for (unsigned i = 0; i < receivers; ++i) {
      DS_ASSIGN(Child child, start_receiver(one, made.agent_, rounds_of(options) + 1, true));
      made.receivers_.push_back(std::move(child));
    }
    for (Child& receiver : made.receivers_) DS_TRY(next_line(receiver));
    return made;
  }
  /// Publishes a version; seconds from the call of offload until the last receiver has committed it, its memory read
  /// again and found to be the version's.
  Result<double> publish(const std::string& root) {
    DS_ASSIGN(const Round round, trainer_.publish());
    double last = round.started_at;
    for (Child& receiver : receivers_) {
      DS_ASSIGN(const Json line, next_line(receiver));
      if (line.contains("error")) return Error(Errc::internal, "a receiver failed: " + line.dump());
      if (line.at("root") != root) return Error(Errc::corrupt, "a receiver's bytes differ from the trainer's");
      last = std::max(last, line.at("committed_at").get<double>());
    }
    return last - round.started_at;
  }
  Result<double> agent_cpu_s() const { return process_cpu_s(agent_.pid()); }

 private:
  FannedOut(BenchAgent agent, Trainer trainer) : agent_(std::move(agent)), trainer_(std::move(trainer)) {}
  BenchAgent agent_;
  Trainer trainer_;
  std::vector<Child> receivers_;
};

/// Seconds in which plain sockets, one for each receiver, would bring each the whole of `model`.
Result<double> plain_sockets_s(ByteSpan model, unsigned receivers, ThreadPool& pool) {
  const UniqueFd file(::memfd_create("deltasync-bench", MFD_CLOEXEC));
  if (!file) return Error::from_errno("memfd_create", errno);
  for (ByteSpan rest = model; !rest.empty();) {
    const ssize_t wrote = ::write(file.get(), rest.data(), rest.size());
    if (wrote < 0) return Error::from_errno("write to memory", errno);
    rest = rest.subspan(static_cast<std::size_t>(wrote));
  }
  DS_ASSIGN(const Buffer to, Buffer::allocate(model.size(), pool));
  double best_s = 1e300;
  for (unsigned round = 0; round < 3; ++round) {
    DS_ASSIGN(const double once_s, transfer_once(file.get(), 0, to.span(), receivers));
    best_s = std::min(best_s, once_s);
  }
  return best_s * receivers;
}

struct FanoutTimes {
  double full_s = 0;
  double delta_s = 0;      ///< the median
  double delta_cpu_s = 0;  ///< the agent's for one version, the mean
};
Result<FanoutTimes> run_fanout_of(const Options& options, SyntheticModel& model, const LayoutPtr& layout,
                                  std::span<std::byte> half, ThreadPool& pool, unsigned receivers) {
  DS_ASSIGN(FannedOut fanout, FannedOut::start(options, layout, half, receivers));
  FanoutTimes times;
  DS_ASSIGN(times.full_s, fanout.publish(deltasync::to_string(root_of(*layout, half, pool))));
  DS_ASSIGN(const double before_s, fanout.agent_cpu_s());
  std::vector<double> delta_s;
  for (unsigned i = 0; i < rounds_of(options); ++i) {
    model.step();
    model.write_half(half);
    DS_ASSIGN(const double took_s, fanout.publish(deltasync::to_string(root_of(*layout, half, pool))));
    delta_s.push_back(took_s);
  }
  DS_ASSIGN(const double after_s, fanout.agent_cpu_s());
  times.delta_s = median(delta_s);
  times.delta_cpu_s = (after_s - before_s) / rounds_of(options);
  return times;
}

}  // namespace

/// One agent with more and more receivers: what each of them costs it, and how fast it gives all of them the model.
Result<Json> run_fanout(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  SyntheticModel model(layout, options.density, options.seed, pool);
  model.write_half(source.span());
  DS_ASSIGN(const FanoutTimes alone, run_fanout_of(options, model, layout, source.span(), pool, 0));
  Json table = Json::array();
  for (const unsigned receivers : {1U, 4U, 16U, 64U}) {
    DS_ASSIGN(const FanoutTimes times, run_fanout_of(options, model, layout, source.span(), pool, receivers));
    DS_ASSIGN(const double plain_s, plain_sockets_s(source.span(), receivers, pool));
    const double bytes = static_cast<double>(layout->half_bytes()) * receivers;
    const double each_s = std::max(0.0, times.delta_cpu_s - alone.delta_cpu_s) / receivers;
    table.push_back({{"receivers", receivers},
                     {"delta_s", times.delta_s},
                     {"agent_cpu_ms_each", 1e3 * each_s},
                     {"percent_of_diff", 100 * each_s / alone.delta_cpu_s},
                     {"full_s", times.full_s},
                     {"full_gb_per_s", 1e-9 * bytes / times.full_s},
                     {"plain_gb_per_s", 1e-9 * bytes / plain_s},
                     {"ratio_to_plain", plain_s / times.full_s}});
  }
  return Json{{"density", options.density},
              {"diff_cpu_ms", 1e3 * alone.delta_cpu_s},
              {"verified", true},  // publish() has failed otherwise
              {"by_receivers", std::move(table)}};
}

}  // namespace deltasync::bench
