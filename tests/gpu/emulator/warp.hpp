// A warp: 32 lanes of a block, each with a place in the code. Lanes at the same place go on together.
#pragma once

#include <array>
#include <optional>
#include <random>

#include "tests/gpu/emulator/accesses.hpp"

namespace deltasync::emulator {

class Warp {
 public:
  /// `first`: the block's thread that is lane 0.
  Warp(const Launch& launch, Accesses& accesses, std::uint32_t first);

  /// Of another block. `any_order`: of lanes that have parted any may go on, as devices since sm_70 do; else those
  /// that are furthest behind, as older ones did.
  void begin(std::uint32_t block, bool any_order);
  /// Until all lanes have ended or wait at the block's barrier, or `steps` instructions are done.
  std::optional<Fault> run(std::uint64_t steps, std::mt19937_64& random);
  bool ended() const { return live_ == 0; }
  bool at_barrier() const { return live_ != 0 && at_barrier_ == live_; }
  void pass_barrier() { at_barrier_ = 0; }
  /// Of all its blocks.
  const Counts& counts() const { return counts_; }

 private:
  std::optional<Fault> run_group(LaneMask group, std::uint32_t at, std::uint32_t limit, std::uint64_t& steps);
  /// Lets lanes go on for which no lane is missing any more.
  std::optional<Fault> meet();
  std::optional<Fault> exchange(LaneMask members);
  std::optional<Fault> shuffle(LaneMask members);
  void vote(LaneMask members);
  void put(LaneMask lanes, std::uint32_t at);
  LaneMask mask_of(std::uint32_t lane) const;
  const Instruction& instruction_of(std::uint32_t lane) const { return function_.code[at_[lane]]; }
  Fault wrong(const std::string& what, std::uint32_t lane) const {
    return accesses_.fault(Fault::Kind::lanes, what, instruction_of(lane), first_ + lane);
  }

  const Function& function_;
  const Launch& launch_;
  Accesses& accesses_;
  const std::uint32_t first_;
  bool any_order_ = false;
  Lanes lanes_;
  std::array<std::uint32_t, kLanes> at_{};  ///< the next instruction of each
  LaneMask live_ = 0;
  LaneMask waiting_ = 0;  ///< for other lanes
  LaneMask at_barrier_ = 0;
  Counts counts_;
};

}  // namespace deltasync::emulator
