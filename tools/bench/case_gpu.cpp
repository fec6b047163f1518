// bench gpu: what a receiver does whose weights lie on a CUDA device, against the limits of its bus and its memory.
#include <algorithm>
#include <memory>

#include "bench/halves.hpp"
#include "deltasync/attest.hpp"
#include "gpu/cuda_device.hpp"
#include "gpu/fake_device.hpp"
#include "receiver/target_checks.hpp"
#include "receiver/target_device.hpp"
#include "receiver/target_shadow.hpp"
#include "receiver/verify.hpp"

namespace deltasync::bench {
namespace {

constexpr auto kLimit = std::chrono::seconds(300);
constexpr std::uint64_t kPieceBytes = std::uint64_t{64} << 20;  ///< of a copy that measures the bus

double gbps(std::uint64_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9;
}

TargetState state_of(std::uint64_t number, std::vector<std::uint64_t> digests) {
  const Digest128 root = delta::root_digest(digests);
  return {{{1, number}, "bench"}, root, std::move(digests)};
}

/// One memory with every tensor where a half has it.
Result<PlacementPtr> place(const Halves& halves, const gpu::Memory& live) {
  PlacementPlan plan;
  plan.memories.push_back({"weights", live.data(), live.bytes(), {0}, {}});
  for (const Tensor& t : halves.layout().tensors()) {
    if (t.tile_count == 0) continue;
    plan.slices.push_back({t.spec.name, {0, 0, t.rows, t.cols}, 0, t.offset, t.row_bytes(), t.element_bytes});
  }
  return Placement::build(halves.layout_ptr(), std::move(plan));
}

/// Calls work(stream) and waits for it: seconds.
template <class Fn>
Result<double> time_on(gpu::Device& device, const Fn& work) {
  DS_ASSIGN(const auto stream, device.make_stream());
  DS_ASSIGN(const auto event, device.make_event());
  const Stopwatch watch;
  DS_TRY(work(*stream));
  DS_TRY(stream->record(*event));
  DS_TRY(gpu::wait(*event, Deadline::after(kLimit), "a benchmark's copies"));
  return watch.seconds();
}

struct Limits {
  double h2d_s = 1e300;  ///< of kPieceBytes, from pinned memory
  double d2h_s = 1e300;
  double fill_s = 1e300;  ///< of the device's memory
};

Result<Limits> measure(gpu::Device& device, unsigned rounds) {
  DS_ASSIGN(const gpu::Memory pinned, device.pin(kPieceBytes));
  DS_ASSIGN(const gpu::Memory memory, device.allocate(kPieceBytes));
  Limits best;
  for (unsigned i = 0; i < rounds; ++i) {
    DS_ASSIGN(const double in, time_on(device, [&](gpu::Stream& stream) {
                return stream.copy_in(memory.data(), pinned.data(), kPieceBytes);
              }));
    DS_ASSIGN(const double out, time_on(device, [&](gpu::Stream& stream) {
                return stream.copy_out(pinned.data(), memory.data(), kPieceBytes);
              }));
    DS_ASSIGN(const double fill,
              time_on(device, [&](gpu::Stream& stream) { return stream.zero(memory.data(), kPieceBytes); }));
    best.h2d_s = std::min(best.h2d_s, in);
    best.d2h_s = std::min(best.d2h_s, out);
    best.fill_s = std::min(best.fill_s, fill);
  }
  return best;
}

/// A full update over nothing, put by all of the pool's threads.
Status put_all(Target& target, const Halves& halves, ThreadPool& pool) {
  const Layout& layout = halves.layout();
  DS_TRY(target.begin_full(FullOverLive::in_place, Deadline::after(kLimit)));
  auto* const half = const_cast<std::byte*>(halves.before().data());  // only read
  DS_TRY(run_all(pool, layout.tile_count(), [&](std::uint64_t i, unsigned) {
    const Tile tile = layout.tile(i);
    const Tensor& t = layout.tensors()[tile.tensor];
    const delta::TensorMemory memory{half + t.offset, static_cast<std::size_t>(t.row_bytes())};
    return target.put_tile(tile, {delta::tile_address(memory, tile, t.element_bytes), memory.row_stride});
  }));
  return target.commit_full(state_of(1, halves.digests()), Deadline::after(kLimit));
}

struct Times {
  double full_s = 1e300;
  double verify_s = 1e300;
  double commit_s = 1e300;
  double exchange_s = 1e300;
  double attest_s = 1e300;
  double wake_s = 1e300;
};

/// A step that has been verified over what is on the device.
Result<std::vector<StagedStep>> verified_step(const Target& target, const Halves& halves, const delta::Delta& delta,
                                              ThreadPool& pool) {
  std::vector<StagedStep> steps(1);
  steps[0].from = {1, 1};
  steps[0].to = {1, 2};
  for (const auto& frame : delta.frames) steps[0].frames.push_back({frame.bytes, {}});
  std::vector<std::uint64_t> now = halves.digests();
  ResolvedBudget budget(halves.layout().half_bytes());
  DS_TRY(run_all(pool, steps[0].frames.size(), [&](std::uint64_t i, unsigned) -> Status {
    StagedFrame& frame = steps[0].frames[i];
    DS_ASSIGN(frame.records, delta::parse_frame(halves.layout(), frame.bytes));
    return verify_frame(target, frame, halves.digests(), now, budget);
  }));
  return steps;
}

Status sound(Target& target, const Placement& placement) {
  DS_ASSIGN(const auto differ, attest(target, placement, Deadline::after(kLimit)));
  if (differ.empty()) return {};
  return Error(Errc::corrupt, std::to_string(differ.size()) + " tiles on the device differ from what was committed");
}

Status run_round(Target& target, const Placement& placement, const Halves& halves, const delta::Delta& delta,
                 const std::vector<std::uint64_t>& digests, ThreadPool& pool, Times& best) {
  const auto keep_best = [](double& of, const Stopwatch& watch) { of = std::min(of, watch.seconds()); };
  const Stopwatch full;
  DS_TRY(put_all(target, halves, pool));
  keep_best(best.full_s, full);
  const Stopwatch verify;
  DS_ASSIGN(auto steps, verified_step(target, halves, delta, pool));
  keep_best(best.verify_s, verify);
  TargetState state = state_of(2, digests);
  const Stopwatch commit;
  DS_TRY(target.commit_delta(std::move(steps), std::move(state), Deadline::after(kLimit)));
  keep_best(best.commit_s, commit);
  const Stopwatch attested;
  DS_TRY(sound(target, placement));
  keep_best(best.attest_s, attested);
  const Stopwatch exchange;
  DS_TRY(target.rollback());
  keep_best(best.exchange_s, exchange);
  return sound(target, placement);
}

/// All of the device's memory from a shadow on the host.
Status wake(TargetPtr live, const Placement& placement, const Halves& halves, ThreadPool& pool, unsigned rounds,
            Times& best) {
  ShadowedTarget target(std::move(live), {});
  DS_TRY(target.open(pool, Deadline::after(kLimit)));
  DS_TRY(put_all(target, halves, pool));
  for (unsigned round = 0; round < rounds; ++round) {
    DS_TRY(target.give_up_live(Deadline::after(kLimit)));
    const Stopwatch watch;
    DS_TRY(target.restore(Deadline::after(kLimit)));
    best.wake_s = std::min(best.wake_s, watch.seconds());
  }
  return sound(target, placement);
}

/// The tests' device, where all of this can be tried and nothing measured.
Result<std::unique_ptr<gpu::Device>> open_device(const Options& options) {
  if (!options.fake_device) return gpu::open_cuda_device(0);
  gpu::FakeDevice::Options fake;
  fake.seed = options.seed;
  return std::unique_ptr<gpu::Device>(std::make_unique<gpu::FakeDevice>(fake));
}

}  // namespace

Result<Json> run_gpu(const Options& options) {
  DS_ASSIGN(const std::unique_ptr<gpu::Device> device, open_device(options));
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  const Layout& layout = halves.layout();
  auto digests = halves.digests();
  const auto delta = halves.encode(digests, pool);
  DS_ASSIGN(const Limits limits, measure(*device, rounds_of(options)));
  DS_ASSIGN(const gpu::Memory live, device->allocate(layout.half_bytes()));
  DS_ASSIGN(const PlacementPtr placement, place(halves, live));
  std::vector<DeviceExecutor::Source> sources(1);
  sources[0].device = device.get();
  DS_ASSIGN(TargetPtr target, make_device_target_on(placement, std::move(sources), {}));
  DS_TRY(target->open(pool, Deadline::after(kLimit)));
  Times best;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    DS_TRY(run_round(*target, *placement, halves, delta, digests, pool, best));
  }
  DS_TRY(wake(std::move(target), *placement, halves, pool, rounds_of(options), best));
  const std::uint64_t bytes = layout.model_bytes();
  return Json{{"device", device->name()},
              {"pinned_h2d_limit_gbps", gbps(kPieceBytes, limits.h2d_s)},
              {"pinned_d2h_limit_gbps", gbps(kPieceBytes, limits.d2h_s)},
              {"hbm_fill_gbps", gbps(kPieceBytes, limits.fill_s)},
              {"full_h2d_gbps", gbps(bytes, best.full_s)},
              {"verify_s", best.verify_s},
              {"pause_ms", best.commit_s * 1e3},
              {"scatter_ms", best.exchange_s * 1e3},
              {"attest_ms", best.attest_s * 1e3},
              {"attest_gbps", gbps(bytes, best.attest_s)},
              {"wake_ms", best.wake_s * 1e3},
              {"wake_gbps", gbps(bytes, best.wake_s)},
              {"density", static_cast<double>(delta.changed) / static_cast<double>(layout.elements())}};
}

}  // namespace deltasync::bench
