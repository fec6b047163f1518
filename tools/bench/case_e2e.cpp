// bench e2e: trainer (this process), agent and receiver are three real processes. One timed version is: offload called
// → receiver committed. The receiver's root is read again from its memory and compared with that of the trainer's own
// bytes.
#include <algorithm>
#include <cmath>
#include <functional>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "bench/end_to_end.hpp"
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "delta/delta.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::bench {
namespace {

template <class Field>
double median_of(const std::vector<Round>& rounds, const Field& field) {
  std::vector<double> values;
  values.reserve(rounds.size());
  for (const auto& r : rounds) values.push_back(field(r));
  return median(std::move(values));
}

/// Of a field that the receiver reports.
double median_of(const std::vector<Round>& rounds, const char* field) {
  return median_of(rounds, [field](const Round& r) { return r.received.at(field).get<double>(); });
}

std::uint64_t whole(double value) {
  return static_cast<std::uint64_t>(std::llround(value));
}

/// Offload called → committed by the receiver.
double total_s(const Round& round) {
  return round.received.at("committed_at").get<double>() - round.started_at;
}

/// Publishes rounds_of(options) versions after a first one, which is a full transfer and is not timed, and holds what
/// the receiver has in memory against `source` each time. `next(i)` makes version i's bytes in `source`.
Result<std::vector<Round>> run_versions(const Options& options, Trainer& trainer, Child& receiver, const Layout& layout,
                                        ByteSpan source, ThreadPool& pool, const std::function<void(unsigned)>& next) {
  std::vector<Round> rounds;
  for (unsigned i = 0; i <= rounds_of(options); ++i) {
    next(i);
    DS_ASSIGN(Round round, trainer.publish(receiver));
    if (round.received.at("root") != deltasync::to_string(root_of(layout, source, pool))) {
      return Error(Errc::corrupt,
                   "version " + std::to_string(i + 1) + ": the receiver's bytes differ from the trainer's");
    }
    if (i > 0) rounds.push_back(std::move(round));
  }
  DS_TRY(receiver.wait_end(Deadline::after(kCaseLimit)));  // its timeline is written then
  return rounds;
}

/// What the memory allows: a copy of the model and then a look at both versions, as if neither helped the other.
struct Limits {
  double copy_s = 1e300;
  double read_both_s = 1e300;
  double sum_s() const { return copy_s + read_both_s; }
};
Result<Limits> measure_limits(ByteSpan model, ThreadPool& pool) {
  DS_ASSIGN(const Buffer to, Buffer::allocate(model.size(), pool));
  Limits limits;
  limits.copy_s = memcpy_s(to.span(), model, pool);
  for (unsigned round = 0; round < 5; ++round) {
    limits.read_both_s = std::min(limits.read_both_s, read_both_once(model, to.span(), pool));
  }
  return limits;
}

/// A relay, of which each version is a line of output.
Result<Child> start_relay(const Options& options, const BenchAgent& from, const BenchAgent& node) {
  return Child::spawn(
      {(options.bin_dir / "deltasync").string(), "relay", "--from", from.endpoint(), "--agent", node.socket(),
       "--streams", std::to_string(options.streams), "--threads", std::to_string(options.threads), "--json"},
      true);
}

}  // namespace

Result<Json> run_e2e(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  DS_ASSIGN(const Limits limits, measure_limits(source.span(), pool));
  SyntheticModel model(layout, options.density, options.seed, pool);
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, source.span(), options.threads));
  DS_ASSIGN(Child receiver, start_receiver(options, agent, rounds_of(options) + 1));
  const RssSampler agent_rss(agent.pid());
  const RssSampler receiver_rss(receiver.pid());
  DS_ASSIGN(const auto rounds,
            run_versions(options, trainer, receiver, *layout, source.span(), pool, [&](unsigned version) {
              if (version > 0) model.step();
              model.write_half(source.span());
            }));
  const double total = median_of(rounds, total_s);
  return Json{{"density", median_of(rounds, "changed") / static_cast<double>(layout->elements())},
              {"memcpy_s", limits.copy_s},
              {"offload_s", median_of(rounds, [](const Round& r) { return r.offload.total_s; })},
              {"guard_s", median_of(rounds, [](const Round& r) { return r.offload.guard_s; })},
              {"commit_to_delta_s", median_of(rounds, [](const Round& r) { return r.ready_s; })},
              {"pull_s", median_of(rounds, "pull_s")},
              {"commit_s", median_of(rounds, "commit_s")},
              {"total_s", total},
              {"ratio_to_memcpy", total / limits.copy_s},
              {"limit_s", limits.sum_s()},
              {"ratio_to_limit", total / limits.sum_s()},
              {"verified", true},  // run_versions has failed otherwise
              {"mode", rounds.back().received.at("mode").get<std::string>()},
              {"compact", options.compact},
              {"wire_bytes", whole(median_of(rounds, "wire_bytes"))},
              {"full_bytes", layout->half_bytes()},
              {"agent_rss_bytes", agent_rss.peak_bytes()},
              {"receiver_rss_bytes", receiver_rss.peak_bytes()},
              {"versions", rounds.size()}};
}

namespace {

constexpr std::uint64_t kSmallElements = 512;

Result<LayoutPtr> small_tensors(unsigned count) {
  std::vector<TensorSpec> specs;
  for (unsigned i = 0; i < count; ++i) {
    specs.push_back(
        {"model.layers." + std::to_string(i / 1500) + ".mlp.experts." + std::to_string(i % 1500) + ".down_proj.weight",
         Dtype::bf16,
         {kSmallElements},
         {},
         {}});
  }
  return Layout::build(std::move(specs));
}

/// The same bytes as one tensor.
Result<LayoutPtr> one_tensor(unsigned count) {
  std::vector<TensorSpec> specs;
  specs.push_back({"model.embed_tokens.weight", Dtype::bf16, {count, kSmallElements}, {}, {}});
  return Layout::build(std::move(specs));
}

/// Versions of which one element changes, the same for all layouts.
Result<std::vector<Round>> run_one_element(const Options& options, const LayoutPtr& layout, std::span<std::byte> source,
                                           ThreadPool& pool) {
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, source, options.threads));
  DS_ASSIGN(Child receiver, start_receiver(options, agent, rounds_of(options) + 1));
  const std::uint64_t elements = layout->elements();
  return run_versions(options, trainer, receiver, *layout, source, pool, [&](unsigned version) {
    const std::uint64_t element = version * 7919 * kSmallElements % elements + version % kSmallElements;
    source[2 * element] = static_cast<std::byte>(version);
  });
}

}  // namespace

Result<Json> run_tensors(const Options& options) {
  constexpr unsigned kTensors = 90'000;
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, small_tensors(kTensors));
  DS_ASSIGN(const auto whole_layout, one_tensor(kTensors));
  if (layout->half_bytes() != whole_layout->half_bytes()) return Error(Errc::internal, "the layouts differ in bytes");
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  std::fill(source.span().begin(), source.span().end(), std::byte{0x3C});
  DS_ASSIGN(const Limits limits, measure_limits(source.span(), pool));
  Options untraced = options;
  untraced.trace.clear();  // its files are of the many tensors
  DS_ASSIGN(const auto of_one, run_one_element(untraced, whole_layout, source.span(), pool));
  DS_ASSIGN(const auto rounds, run_one_element(options, layout, source.span(), pool));
  const double update_ms = 1e3 * median_of(rounds, total_s);
  const double one_tensor_ms = 1e3 * median_of(of_one, total_s);
  const auto offload_ms = [](const Round& r) { return 1e3 * r.offload.total_s; };
  const auto delivery_ms = [](const Round& r) { return 1e3 * (total_s(r) - r.offload.total_s); };
  return Json{{"tensors", kTensors},
              {"update_ms", update_ms},
              {"one_tensor_ms", one_tensor_ms},
              {"over_bytes_ms", update_ms - one_tensor_ms},
              {"limit_ms", 1e3 * limits.sum_s()},
              {"ratio_to_limit", update_ms / (1e3 * limits.sum_s())},
              {"offload_ms", median_of(rounds, offload_ms)},
              {"commit_to_delta_ms", 1e3 * median_of(rounds, [](const Round& r) { return r.ready_s; })},
              {"delivery_ms", median_of(rounds, delivery_ms)},
              {"pull_ms", 1e3 * median_of(rounds, "pull_s")},
              {"commit_ms", 1e3 * median_of(rounds, "commit_s")},
              {"wire_bytes_per_update", whole(median_of(rounds, "wire_bytes"))},
              {"metadata_bytes_per_update", whole(median_of(rounds, "metadata_bytes"))}};
}

/// The same versions twice: to a receiver of the trainer's agent, and then to one of a node's agent, which gets them by
/// a relay. Only one of the receivers is there at a time.
Result<Json> run_relay(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  SyntheticModel model(layout, options.density, options.seed, pool);
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, source.span(), options.threads));
  const auto next = [&](unsigned version) {
    if (version > 0) model.step();
    model.write_half(source.span());
  };
  const unsigned count = rounds_of(options) + 1;
  DS_ASSIGN(Child direct_receiver, start_receiver(options, agent, count));
  DS_ASSIGN(const auto direct, run_versions(options, trainer, direct_receiver, *layout, source.span(), pool, next));

  Options untraced = options;
  untraced.trace.clear();  // its file is of the first agent and receiver
  DS_ASSIGN(const BenchAgent node, BenchAgent::start(untraced));
  DS_ASSIGN(Child relay, start_relay(options, agent, node));
  DS_TRY(next_line(relay));  // the version before, whole
  DS_ASSIGN(Child receiver, start_receiver(untraced, node, count + 1));
  DS_TRY(next_line(receiver));
  DS_ASSIGN(const auto relayed, run_versions(options, trainer, receiver, *layout, source.span(), pool, next));
  std::vector<double> commit_s;
  std::vector<double> served_s;
  std::vector<double> transfer_s;
  for (unsigned i = 0; i < count; ++i) {
    DS_ASSIGN(const Json line, next_line(relay));
    commit_s.push_back(line.at("commit_s").get<double>());
    served_s.push_back(line.at("served_s").get<double>());
    transfer_s.push_back(line.at("transfer_s").get<double>());
  }
  const double direct_s = median_of(direct, total_s);
  const double relayed_s = median_of(relayed, total_s);
  return Json{{"density", median_of(relayed, "changed") / static_cast<double>(layout->elements())},
              {"direct_s", direct_s},
              {"relayed_s", relayed_s},
              {"ratio_to_direct", relayed_s / direct_s},
              {"relay_transfer_s", median(transfer_s)},
              {"relay_commit_s", median(commit_s)},
              {"node_diff_s", median(served_s)},
              {"verified", true},  // run_versions has failed otherwise
              {"mode", relayed.back().received.at("mode").get<std::string>()},
              {"wire_bytes", whole(median_of(relayed, "wire_bytes"))},
              {"versions", relayed.size()}};
}

}  // namespace deltasync::bench
