// bench gpu: what a receiver and a trainer do whose weights lie on a CUDA device, against the limits of its bus and its
// memory.
#include <algorithm>
#include <memory>

#include "base/deadline.hpp"
#include "bench/device_fanout.hpp"
#include "bench/device_limits.hpp"
#include "bench/device_offload.hpp"
#include "bench/halves.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/device/device_target.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/verify.hpp"

namespace deltasync::bench {
namespace {

/// One memory with every tensor where a half has it.
Result<std::shared_ptr<const Placement>> place(const Halves& halves, const gpu::Memory& live) {
  PlacementPlan plan;
  plan.memories.push_back({"weights", live.data(), live.bytes(), {0}, {}});
  for (const Tensor& t : halves.layout().tensors()) {
    if (t.tile_count == 0) continue;
    plan.slices.push_back({t.spec.name, {0, 0, t.rows, t.cols}, 0, t.offset, t.row_bytes(), t.element_bytes});
  }
  return Placement::build(halves.layout_ptr(), std::move(plan));
}

/// A full update over nothing, put by all of the pool's threads.
Status put_all(Target& target, const Halves& halves, ThreadPool& pool) {
  const Layout& layout = halves.layout();
  DS_TRY(target.begin_full(FullUpdatePolicy::in_place, Deadline::after(kDeviceLimit)));
  auto* const half = const_cast<std::byte*>(halves.before().data());  // only read
  DS_TRY(run_all(pool, layout.tile_count(), [&](std::uint64_t i, unsigned) {
    const Tile tile = tile_of(layout, i);
    const Tensor& t = layout.tensors()[tile.tensor];
    const delta::TensorMemory memory{half + t.offset, static_cast<std::size_t>(t.row_bytes())};
    return target.put_tile(tile, {delta::tile_address(memory, tile, t.element_bytes), memory.row_stride});
  }));
  return target.commit_full(state_of(1, halves.digests()), Deadline::after(kDeviceLimit));
}

struct GpuTimes {
  double full_s = 1e300;
  double verify_s = 1e300;
  double verify_absolute_s = 1e300;
  double commit_s = 1e300;
  double exchange_s = 1e300;
  double attest_s = 1e300;
  double wake_s = 1e300;
  double wake_copied_s = 1e300;
  bool shadow_pinned = false;
  double density = 0;
  std::uint64_t delta_bytes = 0;
  std::uint64_t delta_absolute_bytes = 0;
};

/// The same step in both forms of its values: steps of the ulp map, which the device adds to what it has, and the
/// values themselves.
struct Forms {
  delta::Delta ulp;
  delta::Delta absolute;
};

/// A step that has been verified over what is on the device.
Result<std::vector<StagedStep>> verified_step(Target& target, const Halves& halves, const delta::Delta& delta,
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

Status check_all_tiles(Target& target, const Placement& placement) {
  DS_ASSIGN(const auto differ, attest(target, parts_of(placement).tiles, Deadline::after(kDeviceLimit)));
  if (differ.empty()) return {};
  return Error(Errc::corrupt, std::to_string(differ.size()) + " tiles on the device differ from what was committed");
}

Status run_round(Target& target, const Placement& placement, const Halves& halves, const Forms& forms,
                 const std::vector<std::uint64_t>& digests, ThreadPool& pool, GpuTimes& best) {
  const auto keep_best = [](double& of, const Stopwatch& watch) { of = std::min(of, watch.seconds()); };
  const Stopwatch full;
  DS_TRY(put_all(target, halves, pool));
  keep_best(best.full_s, full);
  const Stopwatch verify_absolute;
  DS_TRY(verified_step(target, halves, forms.absolute, pool));
  keep_best(best.verify_absolute_s, verify_absolute);
  const Stopwatch verify;
  DS_ASSIGN(auto steps, verified_step(target, halves, forms.ulp, pool));
  keep_best(best.verify_s, verify);
  TargetState state = state_of(2, digests);
  const Stopwatch commit;
  DS_TRY(target.commit_delta(std::move(steps), std::move(state), Deadline::after(kDeviceLimit)));
  keep_best(best.commit_s, commit);
  const Stopwatch attested;
  DS_TRY(check_all_tiles(target, placement));
  keep_best(best.attest_s, attested);
  const Stopwatch exchange;
  DS_TRY(roll_back(target));
  keep_best(best.exchange_s, exchange);
  return check_all_tiles(target, placement);
}

/// All of the device's memory from a shadow on the host; with `pin` the device reads it there.
Status wake(std::unique_ptr<Target> live, const Placement& placement, const Halves& halves, ThreadPool& pool,
            unsigned rounds, bool pin, double& best_s, bool& pinned) {
  ShadowedTarget target(std::move(live), {.pin = pin});
  DS_TRY(target.open(pool, Deadline::after(kDeviceLimit)));
  if (pin) pinned = target.state().pinned;
  DS_TRY(put_all(target, halves, pool));
  for (unsigned round = 0; round < rounds; ++round) {
    DS_TRY(target.release(Deadline::after(kDeviceLimit)));
    const Stopwatch watch;
    DS_TRY(target.restore(Deadline::after(kDeviceLimit)));
    best_s = std::min(best_s, watch.seconds());
  }
  return check_all_tiles(target, placement);
}

/// All that a receiver does, which leaves both versions on the device and nothing on the host.
Result<OnDevice> receive(const Options& options, gpu::Device& device, ThreadPool& pool, GpuTimes& best) {
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  auto digests = halves.digests();
  auto digests_again = digests;
  const Forms forms{halves.encode(digests, pool), halves.encode(digests_again, pool, delta::ValueForm::absolute)};
  OnDevice model;
  model.layout = halves.layout_ptr();
  model.roots = {delta::root_digest(halves.digests()), delta::root_digest(digests)};
  for (gpu::Memory& memory : model.memory) {
    DS_ASSIGN(memory, device.allocate(model.layout->half_bytes()));
  }
  DS_ASSIGN(const std::shared_ptr<const Placement> placement, place(halves, model.memory[0]));
  const auto make_target = [&] {
    std::vector<DeviceExecutor::PlacedDevice> sources(1);
    sources[0].device = &device;
    return make_device_target_on(placement, std::move(sources), {});
  };
  DS_ASSIGN(std::unique_ptr<Target> target, make_target());
  DS_TRY(target->open(pool, Deadline::after(kDeviceLimit)));
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    DS_TRY(run_round(*target, *placement, halves, forms, digests, pool, best));
  }
  target.reset();
  for (const bool pin : {false, true}) {  // to the first version
    DS_ASSIGN(std::unique_ptr<Target> live, make_target());
    DS_TRY(wake(std::move(live), *placement, halves, pool, rounds_of(options), pin,
                pin ? best.wake_s : best.wake_copied_s, best.shadow_pinned));
  }
  DS_TRY(upload(device, model.memory[1].data(), halves.after()));
  best.density = static_cast<double>(forms.ulp.changed) / static_cast<double>(model.layout->elements());
  best.delta_bytes = forms.ulp.frame_bytes;
  best.delta_absolute_bytes = forms.absolute.frame_bytes;
  return model;
}

/// Other devices may be in use, or out of memory: that is told, and the first one's figures stay.
Status add_fanout(const Options& options, Json& result) {
  const auto measured = measure_fanout(options, rounds_of(options));
  if (!measured.ok()) {
    if (measured.error().code() == Errc::corrupt) return measured.error();
    result["fanout_error"] = measured.error().to_string();
    return {};
  }
  if (!*measured) return {};
  const Fanout& fanout = **measured;
  result["devices"] = fanout.devices;
  result["fanout_h2d_gbps"] = fanout.h2d_gbps;
  if (!fanout.no_nccl.empty()) {
    result["fanout_no_nccl"] = fanout.no_nccl;
    return {};
  }
  result["fanout_nccl_gbps"] = fanout.nccl_gbps;
  result["fanout_nccl_to_h2d"] = fanout.nccl_gbps / fanout.h2d_gbps;
  return {};
}

}  // namespace

Result<Json> run_gpu(const Options& options) {
  DS_ASSIGN(const BenchDevice opened, open_device(options));
  gpu::Device& device = *opened.device;
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const BusLimits limits, measure_device(opened, rounds_of(options)));
  GpuTimes best;
  DS_ASSIGN(const OnDevice model, receive(options, device, pool, best));
  DS_ASSIGN(const DeviceOffload offload, offload_from_device(options, opened, model, pool));
  const std::uint64_t bytes = model.layout->model_bytes();
  const double offload_gbps = gbps(bytes, offload.offload_s);
  const double full_gbps = gbps(bytes, best.full_s);
  const double attest_gbps = gbps(bytes, best.attest_s);
  Json result{{"device", device.name()},
              {"model_bytes", bytes},
              {"density", best.density},
              {"pinned_d2h_limit_gbps", limits.d2h_gbps},
              {"offload_gbps", offload_gbps},
              {"offload_to_limit", offload_gbps / limits.d2h_gbps},
              {"offload_ms", offload.offload_s * 1e3},
              {"offload_write_ms", offload.write_s * 1e3},
              {"offload_registered", offload.registered},
              {"pinned_h2d_limit_gbps", limits.h2d_gbps},
              {"full_h2d_gbps", full_gbps},
              {"full_h2d_to_limit", full_gbps / limits.h2d_gbps},
              {"delta_bytes", best.delta_bytes},
              {"verify_s", best.verify_s},
              {"delta_absolute_bytes", best.delta_absolute_bytes},
              {"verify_absolute_s", best.verify_absolute_s},
              {"pause_ms", best.commit_s * 1e3},
              {"scatter_ms", best.exchange_s * 1e3},
              {"hbm_limit_gbps", limits.hbm_gbps},
              {"hbm_limit_bytes", limits.hbm_bytes},
              {"attest_ms", best.attest_s * 1e3},
              {"attest_gbps", attest_gbps},
              {"attest_to_limit", attest_gbps / limits.hbm_gbps},
              {"wake_ms", best.wake_s * 1e3},
              {"wake_gbps", gbps(bytes, best.wake_s)},
              {"wake_to_limit", gbps(bytes, best.wake_s) / limits.h2d_gbps},
              {"wake_copied_gbps", gbps(bytes, best.wake_copied_s)},
              {"shadow_pinned", best.shadow_pinned}};
  DS_TRY(add_fanout(options, result));
  return result;
}

}  // namespace deltasync::bench
