// bench apply: what a receiver with a host target does with a delta that has arrived (parse, decode and verify every
// tile, save its undo log, write it), against one memcpy of the model.
#include <algorithm>
#include <cstring>

#include "base/deadline.hpp"
#include "bench/halves.hpp"
#include "bench/limits.hpp"
#include "receiver/targets/target.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/verify.hpp"

namespace deltasync::bench {
namespace {

/// A host target in `memory` that has the version before committed.
Result<std::unique_ptr<Target>> make_target(const Halves& halves, std::span<std::byte> memory, ThreadPool& pool) {
  auto target = make_host_target(halves.layout_ptr(), memory);
  DS_TRY(target->open(pool, Deadline::after(kCaseLimit)));
  DS_TRY(target->begin_full(FullUpdatePolicy::stage, Deadline::after(kCaseLimit)));
  std::copy(halves.before().begin(), halves.before().end(), memory.begin());
  DS_TRY(target->commit_full(state_of(1, halves.digests()), Deadline::after(kCaseLimit)));
  return target;
}

constexpr std::size_t kLine = 64;

/// Numbers of the cache lines that have a change, in order.
std::vector<std::uint32_t> changed_lines(const Halves& halves) {
  std::vector<std::uint32_t> lines;
  for (std::size_t at = 0; at < halves.before().size(); at += kLine) {
    const std::size_t n = std::min(kLine, halves.before().size() - at);
    if (std::memcmp(halves.before().data() + at, halves.after().data() + at, n) != 0) {
      lines.push_back(static_cast<std::uint32_t>(at / kLine));
    }
  }
  return lines;
}

/// Seconds to load a word of each of these lines, and then, once more from the beginning, to load and store it: what no
/// update that is verified before it is written can do without.
double touch_once(std::span<std::byte> memory, const std::vector<std::uint32_t>& lines, ThreadPool& pool) {
  constexpr std::size_t kPiece = 8192;
  constexpr std::size_t kAhead = 256;
  const auto pass = [&](bool write) {
    pool.run((lines.size() + kPiece - 1) / kPiece, [&](std::uint64_t piece, unsigned) {
      const std::size_t begin = piece * kPiece;
      const std::size_t end = std::min(begin + kPiece, lines.size());
      std::uint64_t sum = 0;
      for (std::size_t i = begin; i < end; ++i) {
        __builtin_prefetch(memory.data() + std::size_t{lines[std::min(i + kAhead, end - 1)]} * kLine, 0, 2);
        std::uint64_t word;
        std::byte* const at = memory.data() + std::size_t{lines[i]} * kLine;
        std::memcpy(&word, at, sizeof word);
        sum += word;
        if (write) std::memcpy(at, &word, sizeof word);
      }
      asm volatile("" : : "r"(sum) : "memory");
    });
  };
  const Stopwatch watch;
  pass(false);
  pass(true);
  return watch.seconds();
}

/// Parses and verifies every frame against the target's memory, as a pull does.
Status verify(Target& target, std::vector<std::uint64_t>& digests, StagedStep& step, ThreadPool& pool) {
  const std::vector<std::uint64_t> before = digests;
  ResolvedBudget budget(target.layout()->model_bytes() / 4);
  return run_all(pool, step.frames.size(), [&](std::uint64_t i, unsigned) -> Status {
    StagedFrame& frame = step.frames[i];
    DS_ASSIGN(frame.records, delta::parse_frame(*target.layout(), frame.bytes));
    return verify_frame(target, frame, before, digests, budget);
  });
}

}  // namespace

Result<Json> run_apply(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  const Layout& layout = halves.layout();
  auto digests = halves.digests();
  const auto delta = halves.encode(digests, pool);
  DS_ASSIGN(const Buffer base, Buffer::allocate(layout.half_bytes(), pool));
  DS_ASSIGN(const Buffer live, Buffer::allocate(layout.half_bytes(), pool));
  std::copy(halves.before().begin(), halves.before().end(), base.span().begin());
  DS_ASSIGN(const auto target, make_target(halves, live.span(), pool));

  const std::vector<std::uint32_t> lines = changed_lines(halves);
  double copy_s = 1e300;
  double touch_s = 1e300;
  double apply_s = 1e300;
  double verify_s = 0;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    copy_s = std::min(copy_s, copy_once(live.span(), base.span(), pool));  // the very bytes that are there
    touch_s = std::min(touch_s, touch_once(live.span(), lines, pool));
    std::vector<StagedStep> steps(1);
    steps[0].from = {1, 1};
    steps[0].to = {1, 2};
    for (const auto& frame : delta.frames) steps[0].frames.push_back({frame.bytes, {}});
    std::vector<std::uint64_t> now = halves.digests();
    TargetState after = state_of(2, digests);
    const Stopwatch watch;
    DS_TRY(verify(*target, now, steps[0], pool));
    const double verified_s = watch.seconds();
    DS_TRY(target->commit_delta(std::move(steps), std::move(after), Deadline::after(kCaseLimit)));
    if (const double s = watch.seconds(); s < apply_s) {
      apply_s = s;
      verify_s = verified_s;
    }
    if (!std::equal(live.span().begin(), live.span().end(), halves.after().begin())) {
      return Error(Errc::corrupt, "the applied version differs from the encoded one");
    }
    DS_TRY(roll_back(*target));
  }
  return Json{{"memcpy_s", copy_s},
              {"apply_s", apply_s},
              {"verify_s", verify_s},
              {"limit_s", touch_s},
              {"ratio_to_limit", apply_s / touch_s},
              {"ratio_to_memcpy", apply_s / copy_s},
              {"density", static_cast<double>(delta.changed) / static_cast<double>(layout.elements())},
              {"isa", delta::isa_name()}};
}

}  // namespace deltasync::bench
