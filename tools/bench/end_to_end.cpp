#include "bench/end_to_end.hpp"

#include <utility>

#include "base/deadline.hpp"
#include "delta/delta.hpp"

namespace deltasync::bench {

Trainer::Trainer(std::vector<SliceSource> slices, std::unique_ptr<Writer> writer)
    : slices_(std::move(slices)), writer_(std::move(writer)), epoch_(make_epoch()) {}

Result<Trainer> Trainer::attach(const std::string& socket, const LayoutPtr& layout, ByteSpan half, unsigned threads) {
  WriterOptions options;
  options.agent_socket = socket;
  options.threads = threads;
  DS_ASSIGN(auto writer, Writer::attach(layout, make_sidecar(*layout), options, Deadline::after(kCaseLimit)));
  std::vector<SliceSource> slices;
  for (std::uint32_t t = 0; t < layout->tensors().size(); ++t) {
    const Tensor& tensor = layout->tensors()[t];
    slices.push_back({{t, {0, 0, tensor.rows, tensor.cols}}, Source{half.data() + tensor.offset}});
  }
  return Trainer(std::move(slices), std::move(writer));
}

Result<Round> Trainer::publish() {
  Round round;
  const Version& version = round.version = {{epoch_, ++number_}, "step_" + std::to_string(number_)};
  round.started_at = monotonic_s();
  DS_TRY(writer_->begin(version, Deadline::after(kCaseLimit)));
  DS_TRY(writer_->write(slices_));
  DS_ASSIGN(round.offload, writer_->commit(Deadline::after(kCaseLimit)));
  const Stopwatch watch;
  DS_TRY(writer_->wait_ready(version.id, Deadline::after(kCaseLimit)));
  round.ready_s = watch.seconds();
  return round;
}

Result<Round> Trainer::publish(Child& receiver) {
  DS_ASSIGN(Round round, publish());
  DS_ASSIGN(const std::string line, receiver.read_line(Deadline::after(kCaseLimit)));
  round.received = Json::parse(line, nullptr, false);
  if (round.received.is_discarded() || round.received.contains("error")) {
    return Error(Errc::internal, "the receiver failed: " + line);
  }
  return round;
}

Digest128 root_of(const Layout& layout, ByteSpan half, ThreadPool& pool) {
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, half, digests, pool);
  return delta::root_digest(digests);
}

Result<Child> start_receiver(const Options& options, const BenchAgent& agent, unsigned count, bool say_bound) {
  std::vector<std::string> argv{(options.bin_dir / "deltasync-bench").string(),
                                kReceiverArg,
                                "--from",
                                agent.endpoint(),
                                "--streams",
                                std::to_string(options.streams),
                                "--threads",
                                std::to_string(options.threads),
                                "--count",
                                std::to_string(count)};
  if (options.compact) argv.emplace_back("--compact");
  if (say_bound) argv.emplace_back("--say-bound");
  if (!options.trace.empty()) argv.insert(argv.end(), {"--trace", trace_part(options, "receiver").string()});
  return Child::spawn(argv, true);
}

Result<Json> next_line(Child& child) {
  DS_ASSIGN(const std::string line, child.read_line(Deadline::after(kCaseLimit)));
  Json parsed = Json::parse(line, nullptr, false);
  if (parsed.is_discarded()) return Error(Errc::internal, "a line that is no JSON: " + line);
  return parsed;
}

}  // namespace deltasync::bench
