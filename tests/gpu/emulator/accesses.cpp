#include "tests/gpu/emulator/accesses.hpp"

#include <cxxabi.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace deltasync::emulator {
namespace {

std::string demangled(const std::string& name) {
  int status = 0;
  char* const made = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string text = status == 0 ? made : name;
  std::free(made);
  return text;
}

std::uint64_t changed(const Instruction& atom, std::uint64_t old, std::uint64_t a, std::uint64_t b) {
  switch (atom.mode) {
    case Mode::add: return old + a;
    case Mode::min: return lesser(atom.type, old, a);
    case Mode::max: return greater(atom.type, old, a);
    case Mode::and_: return old & a;
    case Mode::or_: return old | a;
    case Mode::xor_: return old ^ a;
    case Mode::cas: return old == a ? b : old;
    default: return a;  // exch
  }
}

/// Streams run at the same time.
template <class U>
std::uint64_t exchange(std::byte* at, const Instruction& atom, std::uint64_t a, std::uint64_t b) {
  std::atomic_ref<U> word(*reinterpret_cast<U*>(at));
  U old = word.load();
  while (!word.compare_exchange_weak(old, static_cast<U>(changed(atom, old, static_cast<U>(a), static_cast<U>(b))))) {
  }
  return old;
}

}  // namespace

void Accesses::begin_block(std::uint64_t block) {
  block_ = block;
  barriers_ = 0;
  shared_.assign(launch_.function->shared_bytes, std::byte{0xC5});
  shared_races_.clear();
}

Fault Accesses::fault(Fault::Kind kind, const std::string& what, const Instruction& instruction,
                      std::uint32_t thread) const {
  std::ostringstream text;
  text << what << "; block " << block_ << " thread " << thread << " of " << demangled(launch_.function->name)
       << ", PTX line " << instruction.line << ": " << launch_.function->text.at(instruction.line);
  return {kind, text.str()};
}

std::byte* Accesses::find(const Instruction& instruction, std::uint64_t address, std::uint32_t bytes) {
  if (instruction.space == Space::shared) {
    return address <= shared_.size() && bytes <= shared_.size() - address ? shared_.data() + address : nullptr;
  }
  for (const Memory::Range& range : known_) {
    if (range.has(address, bytes)) return memory_.real(address);
  }
  const auto range = memory_.find(reinterpret_cast<const void*>(address));
  if (!range || !range->has(address, bytes)) return nullptr;
  if (range->device != Memory::kHost && range->device != launch_.device) return nullptr;
  known_[next_known_++ % known_.size()] = *range;
  return memory_.real(address);
}

std::optional<Fault> Accesses::access(const Instruction& instruction, Lanes& lanes, std::uint32_t lane,
                                      std::uint32_t thread) {
  const std::uint64_t address = lanes.of(instruction.from[0])[lane] + static_cast<std::uint64_t>(instruction.offset);
  const std::uint32_t width = instruction.type.bits / 8;
  const std::uint32_t bytes = width * instruction.count;
  const auto refuse = [&](Fault::Kind kind, const char* what) {
    std::ostringstream where;
    where << what << ": " << bytes << " bytes at 0x" << std::hex << address;
    return fault(kind, where.str(), instruction, thread);
  };
  if (address % bytes != 0) return refuse(Fault::Kind::misaligned, "misaligned address");
  std::byte* const at = find(instruction, address, bytes);
  if (at == nullptr) return refuse(Fault::Kind::out_of_bounds, "out of bounds");
  const Races::Kind kind = instruction.op == Op::st     ? Races::Kind::write
                           : instruction.op == Op::atom ? Races::Kind::atomic
                           : instruction.is_constant    ? Races::Kind::read_constant
                                                        : Races::Kind::read;
  Races& races = instruction.space == Space::shared ? shared_races_ : races_;
  const auto raced = races.touch(address, bytes, instruction.used_bytes, kind, {block_, thread, barriers_});
  if (!raced.empty()) return refuse(Fault::Kind::race, std::string(raced).c_str());
  if (instruction.op == Op::atom) {
    const std::uint64_t a = lanes.of(instruction.from[1])[lane];
    const std::uint64_t b = lanes.of(instruction.from[2])[lane];
    lanes.of(instruction.to[0])[lane] =
        width == 8 ? exchange<std::uint64_t>(at, instruction, a, b) : exchange<std::uint32_t>(at, instruction, a, b);
    return std::nullopt;
  }
  for (std::uint32_t k = 0; k < instruction.count; ++k) {
    if (instruction.op == Op::st) {
      std::memcpy(at + k * width, lanes.of(instruction.from[1 + k]) + lane, width);
      continue;
    }
    std::uint64_t value = 0;
    std::memcpy(&value, at + k * width, width);
    if (instruction.type.is_signed) value = static_cast<std::uint64_t>(sign_extended(value, instruction.type.bits));
    lanes.of(instruction.to[k])[lane] = value & low_bits(instruction.to_bits);
  }
  return std::nullopt;
}

std::optional<Fault> Accesses::run(const Instruction& instruction, Lanes& lanes, LaneMask active, std::uint32_t first) {
  if (instruction.space == Space::param) {
    const std::uint32_t width = instruction.type.bits / 8;
    const std::uint64_t bytes = launch_.parameters.size();
    for (LaneMask left = active; left != 0; left &= left - 1) {
      const auto lane = static_cast<std::uint32_t>(std::countr_zero(left));
      const std::uint64_t at = lanes.of(instruction.from[0])[lane] + static_cast<std::uint64_t>(instruction.offset);
      if (at > bytes || width * instruction.count > bytes - at) {
        return fault(Fault::Kind::out_of_bounds, "out of the parameters' bounds", instruction, first + lane);
      }
      for (std::uint32_t k = 0; k < instruction.count; ++k) {
        std::uint64_t value = 0;
        std::memcpy(&value, launch_.parameters.data() + at + k * width, width);
        lanes.of(instruction.to[k])[lane] = value;
      }
    }
    return std::nullopt;
  }
  LaneMask left = active;
  if (instruction.op == Op::ld && std::popcount(active) > 2) {
    // Lanes that all load the same are as two that do.
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(active));
    const std::uint64_t* const address = lanes.of(instruction.from[0]);
    LaneMask others = 0;
    each_lane(active, [&](std::uint32_t i) { others |= static_cast<LaneMask>(address[i] != address[lane]) << i; });
    if (others == 0) {
      left = LaneMask{1} << lane | LaneMask{1} << (31 - std::countl_zero(active));
      if (auto wrong = access(instruction, lanes, lane, first + lane)) return wrong;
      for (std::uint32_t k = 0; k < instruction.count; ++k) {
        std::uint64_t* const to = lanes.of(instruction.to[k]);
        const std::uint64_t value = to[lane];
        // A load may write the register that has its address, which the last lane's access still needs.
        each_lane(active & ~left, [&](std::uint32_t i) { to[i] = value; });
      }
      left &= left - 1;
    }
  }
  for (; left != 0; left &= left - 1) {
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(left));
    if (auto wrong = access(instruction, lanes, lane, first + lane)) return wrong;
  }
  return std::nullopt;
}

}  // namespace deltasync::emulator
