#include "tests/gpu/emulator/warp.hpp"

#include <algorithm>

namespace deltasync::emulator {

Warp::Warp(const Launch& launch, Accesses& accesses, std::uint32_t first)
    : function_(*launch.function), launch_(launch), accesses_(accesses), first_(first), lanes_(*launch.function) {}

void Warp::begin(std::uint32_t block, bool any_order) {
  any_order_ = any_order;
  at_.fill(0);
  waiting_ = at_barrier_ = 0;
  const std::uint32_t lanes = std::min(kLanes, launch_.threads - first_);
  live_ = static_cast<LaneMask>(low_bits(lanes));
  for (const auto& [number, special] : function_.specials) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      std::uint64_t& value = lanes_.of(number)[lane];
      switch (special) {
        case Special::tid: value = first_ + lane; break;
        case Special::ntid: value = launch_.threads; break;
        case Special::ctaid: value = block; break;
        case Special::nctaid: value = launch_.blocks; break;
        case Special::laneid: value = lane; break;
      }
    }
  }
}

void Warp::put(LaneMask lanes, std::uint32_t at) {
  each_lane(lanes, [&](std::uint32_t lane) { at_[lane] = at; });
}

std::optional<Fault> Warp::run(std::uint64_t steps, std::mt19937_64& random) {
  while (steps > 0) {
    const LaneMask ready = live_ & ~waiting_ & ~at_barrier_;
    if (ready == 0) {
      if (waiting_ == 0) return std::nullopt;
      if (auto fault = meet()) return fault;
      if ((waiting_ & live_) == 0 || (live_ & ~waiting_ & ~at_barrier_) != 0) continue;
      return wrong("waits for lanes that do not come", static_cast<std::uint32_t>(std::countr_zero(waiting_)));
    }
    std::uint32_t at = ~0u;
    each_lane(ready, [&](std::uint32_t lane) { at = std::min(at, at_[lane]); });
    if (any_order_) {
      std::uint64_t skipped = random() % static_cast<std::uint32_t>(std::popcount(ready));
      each_lane(ready, [&](std::uint32_t lane) { at = skipped-- == 0 ? at_[lane] : at; });
    }
    LaneMask group = 0;
    std::uint32_t limit = ~0u;  // where those that are furthest behind meet others
    each_lane(ready, [&](std::uint32_t lane) {
      if (at_[lane] == at) group |= LaneMask{1} << lane;
      if (at_[lane] != at && !any_order_) limit = std::min(limit, at_[lane]);
    });
    if (auto fault = run_group(group, at, limit, steps)) return fault;
  }
  return std::nullopt;
}

std::optional<Fault> Warp::run_group(LaneMask group, std::uint32_t at, std::uint32_t limit, std::uint64_t& steps) {
  const auto first = [&] { return static_cast<std::uint32_t>(std::countr_zero(group)); };
  while (at < limit && steps > 0) {
    if (at >= function_.code.size()) {
      const Instruction& last = function_.code.back();
      return accesses_.fault(Fault::Kind::other, "runs off the end", last, first_ + first());
    }
    const Instruction& instruction = function_.code[at];
    --steps;
    LaneMask active = group;
    if (instruction.guard >= 0) {
      const LaneMask is_true = lanes_.where(static_cast<std::uint32_t>(instruction.guard), group);
      active = instruction.guard_negated ? group & ~is_true : is_true;
    }
    ++at;
    if (active == 0) continue;
    const auto threads = static_cast<std::uint64_t>(std::popcount(active));
    counts_.instructions += threads;
    if (instruction.space == Space::global) {
      counts_.loads += instruction.op == Op::ld ? threads : 0;
      counts_.stores += instruction.op == Op::st ? threads : 0;
    }
    switch (instruction.op) {
      case Op::bra:
        if (active != group) {
          put(active, instruction.target);
          put(group & ~active, at);
          return std::nullopt;
        }
        at = instruction.target;
        break;
      case Op::ret:
        live_ &= ~active;
        group &= ~active;
        if (group == 0) return std::nullopt;
        break;
      case Op::bar_sync:
        at_barrier_ |= active;
        put(group, at);
        return std::nullopt;
      case Op::shfl:
      case Op::vote:
      case Op::bar_warp:
        waiting_ |= active;
        put(active, at - 1);
        put(group & ~active, at);
        return meet();
      case Op::activemask:
        each_lane(active, [&](std::uint32_t lane) { lanes_.of(instruction.to[0])[lane] = active; });
        break;
      case Op::ld:
      case Op::st:
      case Op::atom:
        if (auto fault = accesses_.run(instruction, lanes_, active, first_)) return fault;
        break;
      default:
        if (const std::string_view fault = compute(instruction, lanes_, active); !fault.empty()) {
          return accesses_.fault(Fault::Kind::other, std::string(fault), instruction, first_ + first());
        }
    }
  }
  put(group, at);
  return std::nullopt;
}

LaneMask Warp::mask_of(std::uint32_t lane) const {
  const Instruction& instruction = instruction_of(lane);
  const std::size_t operand = instruction.op == Op::shfl ? 3 : instruction.op == Op::vote ? 1 : 0;
  return static_cast<LaneMask>(lanes_.of(instruction.from[operand])[lane]);
}

std::optional<Fault> Warp::meet() {
  for (LaneMask left = waiting_; left != 0;) {
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(left));
    left &= left - 1;
    const LaneMask members = mask_of(lane);
    if ((members >> lane & 1) == 0) return wrong("is not in its own mask", lane);
    if ((members & ~live_) != 0) return wrong("its mask names a lane that has ended", lane);
    if ((members & ~waiting_) != 0) continue;
    LaneMask others = members;
    for (; others != 0; others &= others - 1) {
      const auto other = static_cast<std::uint32_t>(std::countr_zero(others));
      const Instruction& a = instruction_of(lane);
      const Instruction& b = instruction_of(other);
      if (mask_of(other) != members) return wrong("lanes meet whose masks differ", lane);
      if (a.op != b.op || a.mode != b.mode) return wrong("lanes meet at different instructions", lane);
    }
    if (auto fault = exchange(members)) return fault;
    left &= ~members;
  }
  return std::nullopt;
}

std::optional<Fault> Warp::exchange(LaneMask members) {
  const Op op = instruction_of(static_cast<std::uint32_t>(std::countr_zero(members))).op;
  if (op == Op::shfl) {
    if (auto fault = shuffle(members)) return fault;
  } else if (op == Op::vote) {
    vote(members);
  }
  waiting_ &= ~members;
  each_lane(members, [&](std::uint32_t lane) { ++at_[lane]; });
  return std::nullopt;
}

/// As PTX ISA's pseudocode of shfl.sync has it.
std::optional<Fault> Warp::shuffle(LaneMask members) {
  std::array<std::uint64_t, kLanes> values{};
  each_lane(members, [&](std::uint32_t lane) { values[lane] = lanes_.of(instruction_of(lane).from[0])[lane]; });
  for (LaneMask left = members; left != 0; left &= left - 1) {
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(left));
    const Instruction& shfl = instruction_of(lane);
    const auto b = static_cast<std::uint32_t>(lanes_.of(shfl.from[1])[lane]) & 31;
    const auto c = static_cast<std::uint32_t>(lanes_.of(shfl.from[2])[lane]);
    const std::uint32_t segment = c >> 8 & 31;
    const std::uint32_t lane_max = (lane & segment) | (c & 31 & ~segment);
    const std::uint32_t lane_min = lane & segment;
    std::uint32_t source = lane_min | (b & ~segment);
    bool is_inside = source <= lane_max;
    switch (shfl.mode) {
      case Mode::up:
        source = lane - b;
        is_inside = lane >= b && source >= lane_max;
        break;
      case Mode::down: is_inside = (source = lane + b) <= lane_max; break;
      case Mode::bfly: is_inside = (source = lane ^ b) <= lane_max; break;
      default: break;
    }
    if (!is_inside) source = lane;
    if ((members >> source & 1) == 0) return wrong("reads from a lane that its mask does not name", lane);
    lanes_.of(shfl.to[0])[lane] = values[source] & low_bits(32);
    if (shfl.has_predicate) lanes_.of(shfl.to[1])[lane] = is_inside;
  }
  return std::nullopt;
}

void Warp::vote(LaneMask members) {
  LaneMask yes = 0;
  each_lane(members,
            [&](std::uint32_t lane) { yes |= lanes_.where(instruction_of(lane).from[0], LaneMask{1} << lane); });
  each_lane(members, [&](std::uint32_t lane) {
    const Instruction& vote = instruction_of(lane);
    std::uint64_t& to = lanes_.of(vote.to[0])[lane];
    switch (vote.mode) {
      case Mode::all: to = yes == members; break;
      case Mode::any: to = yes != 0; break;
      case Mode::uni: to = yes == members || yes == 0; break;
      default: to = yes; break;
    }
  });
}

}  // namespace deltasync::emulator
