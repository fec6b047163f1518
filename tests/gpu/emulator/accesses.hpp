// Loads, stores and atomics of a launch: aligned, within one allocation of the device (or pinned host memory), and not
// racing.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/emulator/lanes.hpp"
#include "tests/gpu/emulator/launch.hpp"
#include "tests/gpu/emulator/races.hpp"

namespace deltasync::emulator {

class Accesses {
 public:
  Accesses(const Launch& launch, const Memory& memory) : launch_(launch), memory_(memory) {}

  void begin_block(std::uint64_t block);
  void pass_barrier() { ++barriers_; }
  /// `first`: the thread of lane 0.
  std::optional<Fault> run(const Instruction& instruction, Lanes& lanes, LaneMask active, std::uint32_t first);
  /// With its place: block, thread, kernel and line.
  Fault fault(Fault::Kind kind, const std::string& what, const Instruction& instruction, std::uint32_t thread) const;

 private:
  std::optional<Fault> access(const Instruction& instruction, Lanes& lanes, std::uint32_t lane, std::uint32_t thread);
  /// Null if it may not be accessed.
  std::byte* find(const Instruction& instruction, std::uint64_t address, std::uint32_t bytes);

  const Launch& launch_;
  const Memory& memory_;
  std::uint64_t block_ = 0;
  std::uint32_t barriers_ = 0;
  std::vector<std::byte> shared_;
  Races races_;
  Races shared_races_;
  std::array<Memory::Range, 8> known_{};  ///< found lately
  std::size_t next_known_ = 0;
};

}  // namespace deltasync::emulator
