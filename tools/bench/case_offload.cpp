// bench offload: what a trainer waits for. One copy of the model, an offload to an agent that diffs meanwhile, and one
// to an agent that does not, in turn, each time with the next version of the model.
#include <algorithm>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::bench {
namespace {

struct OffloadTimes {
  double offload_s = 0;
  std::string_view form;
  double ready_s = 0;  ///< commit() returned → the agent serves the version
};

/// An agent of its own with a writer attached to it.
class Offloader {
 public:
  static Result<Offloader> start(Options options, unsigned overlap_threads, const LayoutPtr& layout, ByteSpan half) {
    options.overlap_threads = overlap_threads;
    DS_ASSIGN(BenchAgent agent, BenchAgent::start(options));
    WriterOptions writer_options;
    writer_options.agent_socket = agent.socket();
    writer_options.threads = options.threads;
    DS_ASSIGN(auto writer, Writer::attach(layout, make_sidecar(*layout), writer_options, Deadline::after(kCaseLimit)));
    std::vector<SliceSource> slices;
    for (std::uint32_t t = 0; t < layout->tensors().size(); ++t) {
      const Tensor& tensor = layout->tensors()[t];
      slices.push_back({{t, {0, 0, tensor.rows, tensor.cols}}, Source{half.data() + tensor.offset}});
    }
    return Offloader(std::move(agent), std::move(writer), std::move(slices));
  }

  Result<OffloadTimes> offload() {
    OffloadTimes times;
    const Version version{{epoch_, ++number_}, "step_" + std::to_string(number_)};
    DS_TRY(writer_->begin(version, Deadline::after(kCaseLimit)));
    DS_TRY(writer_->write(slices_));
    DS_ASSIGN(const OffloadReport report, writer_->commit(Deadline::after(kCaseLimit)));
    const Stopwatch watch;
    DS_TRY(writer_->wait_ready(version.id, Deadline::after(kCaseLimit)));
    times.ready_s = watch.seconds();
    times.offload_s = report.total_s;
    times.form = report.copy_form;
    return times;
  }

 private:
  Offloader(BenchAgent agent, std::unique_ptr<Writer> writer, std::vector<SliceSource> slices)
      : agent_(std::move(agent)), writer_(std::move(writer)), slices_(std::move(slices)) {}
  BenchAgent agent_;
  std::unique_ptr<Writer> writer_;  // closes before its agent ends
  std::vector<SliceSource> slices_;
  std::uint64_t epoch_ = make_epoch();
  std::uint64_t number_ = 0;
};

double median_of(const std::vector<OffloadTimes>& times, double OffloadTimes::*field) {
  std::vector<double> values;
  values.reserve(times.size());
  for (const OffloadTimes& t : times) values.push_back(t.*field);
  return median(std::move(values));
}

}  // namespace

Result<Json> run_offload(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  DS_ASSIGN(const Buffer copy, Buffer::allocate(layout->half_bytes(), pool));
  SyntheticModel model(layout, options.density, options.seed, pool);
  model.write_half(source.span());
  DS_ASSIGN(Offloader overlapped, Offloader::start(options, options.overlap_threads, layout, source.span()));
  DS_ASSIGN(Offloader alone, Offloader::start(options, 0, layout, source.span()));
  // The first versions are not diffed, and the second ones write into pages that are new to the trainer.
  for (unsigned warm_up = 0; warm_up < 2; ++warm_up) {
    DS_TRY(overlapped.offload());
    DS_TRY(alone.offload());
  }
  double copy_s = 1e300;
  std::vector<OffloadTimes> with;
  std::vector<OffloadTimes> without;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    model.step();
    model.write_half(source.span());
    copy_s = std::min(copy_s, copy_once(copy.span(), source.span(), pool));
    DS_ASSIGN(with.emplace_back(), overlapped.offload());
    DS_ASSIGN(without.emplace_back(), alone.offload());
  }
  const double offload_s = median_of(with, &OffloadTimes::offload_s);
  const double alone_s = median_of(without, &OffloadTimes::offload_s);
  return Json{{"memcpy_s", copy_s},
              {"offload_s", offload_s},
              {"offload_alone_s", alone_s},
              {"ratio_to_memcpy", offload_s / copy_s},
              {"ratio_to_alone", offload_s / alone_s},
              {"commit_to_delta_s", median_of(with, &OffloadTimes::ready_s)},
              {"commit_to_delta_alone_s", median_of(without, &OffloadTimes::ready_s)},
              {"copy_form", with.back().form},
              {"overlap_threads", options.overlap_threads}};
}

}  // namespace deltasync::bench
