#include "tests/gpu/emulator/launch.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/gpu/emulator/warp.hpp"

namespace deltasync::emulator {
namespace {

constexpr std::uint64_t kTurnsMax = 20'000;  // of a block's warps, of 2,000 instructions: then it does not end

class Blocks {
 public:
  Blocks(const Launch& launch, const Memory& memory)
      : launch_(launch), random_(launch.seed), accesses_(launch, memory) {
    for (std::uint32_t first = 0; first < launch.threads; first += kLanes)
      warps_.emplace_back(launch, accesses_, first);
  }

  std::optional<Fault> run() {
    std::vector<std::uint32_t> order(launch_.blocks);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random_);
    for (const std::uint32_t block : order) {
      if (auto fault = run_block(block)) return fault;
    }
    return std::nullopt;
  }
  Counts counts() const {
    Counts all;
    for (const Warp& warp : warps_) all += warp.counts();
    return all;
  }

 private:
  std::optional<Fault> run_block(std::uint32_t block) {
    accesses_.begin_block(block);
    for (Warp& warp : warps_) warp.begin(block, random_() % 8 == 0);
    for (std::uint64_t turn = 0; turn < kTurnsMax; ++turn) {
      std::vector<Warp*> ready;
      bool at_barrier = false;
      for (Warp& warp : warps_) {
        at_barrier |= warp.at_barrier();
        if (!warp.ended() && !warp.at_barrier()) ready.push_back(&warp);
      }
      if (!ready.empty()) {
        if (auto fault = ready[random_() % ready.size()]->run(1 + random_() % 4096, random_)) return fault;
        continue;
      }
      if (!at_barrier) return std::nullopt;
      accesses_.pass_barrier();
      for (Warp& warp : warps_) warp.pass_barrier();
    }
    return accesses_.fault(Fault::Kind::other, "does not end", launch_.function->code.front(), 0);
  }

  const Launch& launch_;
  std::mt19937_64 random_;
  Accesses accesses_;
  std::vector<Warp> warps_;
};

}  // namespace

std::optional<Fault> run(const Launch& launch, const Memory& memory, Counts* counts) {
  Blocks blocks(launch, memory);
  auto fault = blocks.run();
  if (counts != nullptr) *counts += blocks.counts();
  return fault;
}

}  // namespace deltasync::emulator
