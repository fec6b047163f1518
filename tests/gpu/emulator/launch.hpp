// One launch of a kernel, interpreted: what a device would do, and an account of what it would leave to chance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/emulator/memory.hpp"
#include "tests/gpu/emulator/ptx.hpp"

namespace deltasync::emulator {

/// Why a launch is no valid one. On a device some of these end it with an error; others give wrong results, now and
/// then.
struct Fault {
  enum class Kind : std::uint8_t { misaligned, out_of_bounds, race, lanes, other };
  Kind kind = Kind::other;
  std::string text;  ///< begins with what it is, and has block, thread, kernel and line
};

struct Launch {
  const Function* function = nullptr;
  std::vector<std::byte> parameters;
  std::uint32_t blocks = 1;
  std::uint32_t threads = 1;  ///< of a block
  int device = 0;
  std::uint64_t seed = 0;  ///< of the order of blocks, warps, and of lanes that have parted
};

/// What a launch's threads did in all: it depends on the code and on what it is given, not on orders or seeds.
struct Counts {
  std::uint64_t instructions = 0;
  std::uint64_t loads = 0;   ///< of these, from a device's memory
  std::uint64_t stores = 0;  ///< of these, to it

  Counts& operator+=(const Counts& other) {
    instructions += other.instructions;
    loads += other.loads;
    stores += other.stores;
    return *this;
  }
};

/// Blocks run one after the other. Warps of a block run in turns; lanes of a warp in lock step as long as they agree.
std::optional<Fault> run(const Launch& launch, const Memory& memory, Counts* counts = nullptr);

}  // namespace deltasync::emulator
