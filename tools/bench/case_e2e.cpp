// bench e2e: trainer (this process), agent and receiver are three real processes. One timed version is: offload called
// → receiver committed. The receiver's root is read again from its memory and compared with that of the trainer's own
// bytes.
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "delta/delta.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::bench {
namespace {

constexpr auto kLimit = std::chrono::seconds(120);

struct Round {
  OffloadReport offload;
  double started_at = 0;
  double ready_s = 0;  ///< commit() returned → the agent serves the version
  Json received;
  bool verified = false;
};

class Trainer {
 public:
  static Result<Trainer> attach(const std::string& socket, const LayoutPtr& layout, unsigned threads) {
    WriterOptions options;
    options.agent_socket = socket;
    options.threads = threads;
    DS_ASSIGN(auto writer, Writer::attach(layout, make_sidecar(*layout), options, Deadline::after(kLimit)));
    return Trainer(layout, std::move(writer));
  }

  /// Publishes `half` as the next version and waits for the receiver's line.
  Result<Round> publish(ByteSpan half, Child& receiver) {
    Round round;
    const Version version{{epoch_, ++number_}, "step_" + std::to_string(number_)};
    round.started_at = monotonic_s();
    DS_TRY(writer_->begin(version, Deadline::after(kLimit)));
    for (std::uint32_t t = 0; t < layout_->tensors().size(); ++t) {
      DS_TRY(writer_->write(t, Source{half.data() + layout_->tensors()[t].offset}));
    }
    DS_ASSIGN(round.offload, writer_->commit(Deadline::after(kLimit)));
    const Stopwatch watch;
    DS_TRY(writer_->wait_ready(version.id, Deadline::after(kLimit)));
    round.ready_s = watch.seconds();
    DS_ASSIGN(const std::string line, receiver.read_line(Deadline::after(kLimit)));
    round.received = Json::parse(line, nullptr, false);
    if (round.received.is_discarded() || round.received.contains("error")) {
      return Error(Errc::internal, "the receiver failed: " + line);
    }
    return round;
  }

 private:
  Trainer(LayoutPtr layout, std::unique_ptr<Writer> writer)
      : layout_(std::move(layout)), writer_(std::move(writer)), epoch_(make_epoch()) {}
  LayoutPtr layout_;
  std::unique_ptr<Writer> writer_;
  std::uint64_t epoch_;
  std::uint64_t number_ = 0;
};

Digest128 root_of(const Layout& layout, ByteSpan half, ThreadPool& pool) {
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, half, digests, pool);
  return delta::root_digest(digests);
}

Result<Child> start_receiver(const Options& options, const BenchAgent& agent, unsigned count) {
  return Child::spawn(
      {(options.bin_dir / "deltasync").string(), "bench-receiver", "--from", agent.endpoint(), "--streams",
       std::to_string(options.streams), "--threads", std::to_string(options.threads), "--count", std::to_string(count)},
      true);
}

template <class Field>
double median_of(const std::vector<Round>& rounds, const Field& field) {
  std::vector<double> values;
  for (const auto& r : rounds) values.push_back(field(r));
  return median(std::move(values));
}

}  // namespace

Result<Json> run_e2e(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  double copy_s = 0;
  {
    DS_ASSIGN(const Buffer to, Buffer::allocate(layout->half_bytes(), pool));
    copy_s = memcpy_s(to.span(), source.span(), pool);
  }
  SyntheticModel model(layout, options.density, options.seed, pool);
  DS_ASSIGN(BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, options.threads));
  DS_ASSIGN(Child receiver, start_receiver(options, agent, options.versions + 1));
  const RssSampler agent_rss(agent.pid());
  const RssSampler receiver_rss(receiver.pid());

  std::vector<Round> rounds;
  bool verified = true;
  for (unsigned i = 0; i <= options.versions; ++i) {  // the first is a full transfer and is not timed
    if (i > 0) model.step();
    model.write_half(source.span());
    DS_ASSIGN(Round round, trainer.publish(source.span(), receiver));
    round.verified = round.received.at("root") == deltasync::to_string(root_of(*layout, source.span(), pool));
    verified = verified && round.verified;
    if (i > 0) rounds.push_back(std::move(round));
  }
  const double total_s =
      median_of(rounds, [](const Round& r) { return r.received.at("committed_at").get<double>() - r.started_at; });
  return Json{
      {"density", options.density},
      {"memcpy_s", copy_s},
      {"offload_s", median_of(rounds, [](const Round& r) { return r.offload.total_s; })},
      {"guard_s", median_of(rounds, [](const Round& r) { return r.offload.guard_s; })},
      {"commit_to_delta_s", median_of(rounds, [](const Round& r) { return r.ready_s; })},
      {"pull_s", median_of(rounds, [](const Round& r) { return r.received.at("pull_s").get<double>(); })},
      {"commit_s", median_of(rounds, [](const Round& r) { return r.received.at("commit_s").get<double>(); })},
      {"total_s", total_s},
      {"ratio_to_memcpy", total_s / copy_s},
      {"verified", verified},
      {"mode", rounds.empty() ? "" : rounds.back().received.at("mode").get<std::string>()},
      {"wire_bytes", median_of(rounds, [](const Round& r) { return r.received.at("wire_bytes").get<double>(); })},
      {"full_bytes", layout->half_bytes()},
      {"agent_rss_bytes", agent_rss.peak_bytes()},
      {"receiver_rss_bytes", receiver_rss.peak_bytes()},
      {"versions", options.versions}};
}

Result<Json> run_tensors(const Options& options) {
  constexpr unsigned kTensors = 90'000;
  constexpr std::uint64_t kElements = 512;
  std::vector<TensorSpec> specs;
  for (unsigned i = 0; i < kTensors; ++i) {
    specs.push_back(
        {"model.layers." + std::to_string(i / 1500) + ".mlp.experts." + std::to_string(i % 1500) + ".down_proj.weight",
         Dtype::bf16,
         {kElements},
         {},
         {}});
  }
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, Layout::build(std::move(specs)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  std::fill(source.span().begin(), source.span().end(), std::byte{0x3C});
  DS_ASSIGN(BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, options.threads));
  DS_ASSIGN(Child receiver, start_receiver(options, agent, options.versions + 1));
  std::vector<Round> rounds;
  for (unsigned i = 0; i <= options.versions; ++i) {
    // One element of one tensor.
    source.span()[layout->tensors()[(i * 7919) % kTensors].offset + 2 * (i % kElements)] = static_cast<std::byte>(i);
    DS_ASSIGN(Round round, trainer.publish(source.span(), receiver));
    if (round.received.at("root") != deltasync::to_string(root_of(*layout, source.span(), pool))) {
      return Error(Errc::internal, "the received version differs from the published one");
    }
    if (i > 0) rounds.push_back(std::move(round));
  }
  // An update is what the fleet waits for after the trainer's copy: sealed → committed at the receiver.
  const auto update_s = [](const Round& r) {
    return r.received.at("committed_at").get<double>() - r.started_at - r.offload.total_s;
  };
  return Json{
      {"tensors", kTensors},
      {"update_ms", 1e3 * median_of(rounds, update_s)},
      {"offload_ms", 1e3 * median_of(rounds, [](const Round& r) { return r.offload.total_s; })},
      {"pull_ms", 1e3 * median_of(rounds, [](const Round& r) { return r.received.at("pull_s").get<double>(); })},
      {"wire_bytes_per_update",
       median_of(rounds, [](const Round& r) { return r.received.at("wire_bytes").get<double>(); })},
      {"metadata_bytes_per_update",
       median_of(rounds, [](const Round& r) { return r.received.at("metadata_bytes").get<double>(); })}};
}

}  // namespace deltasync::bench
