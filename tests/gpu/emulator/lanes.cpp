#include "tests/gpu/emulator/lanes.hpp"

#include <algorithm>

namespace deltasync::emulator {
namespace {

__extension__ using Wide = __int128;
__extension__ using UnsignedWide = unsigned __int128;

bool less(Type type, std::uint64_t a, std::uint64_t b) {
  if (type.is_signed) return sign_extended(a, type.bits) < sign_extended(b, type.bits);
  return (a & low_bits(type.bits)) < (b & low_bits(type.bits));
}

bool compared(Compare compare, Type type, std::uint64_t a, std::uint64_t b) {
  switch (compare) {
    case Compare::eq: return ((a ^ b) & low_bits(type.bits)) == 0;
    case Compare::ne: return ((a ^ b) & low_bits(type.bits)) != 0;
    case Compare::lt: return less(type, a, b);
    case Compare::le: return !less(type, b, a);
    case Compare::gt: return less(type, b, a);
    case Compare::ge: break;
  }
  return !less(type, a, b);
}

std::uint64_t high_product(Type type, std::uint64_t a, std::uint64_t b) {
  if (!type.is_signed) return static_cast<std::uint64_t>(UnsignedWide{a} * b >> type.bits);
  return static_cast<std::uint64_t>(Wide{sign_extended(a, type.bits)} * sign_extended(b, type.bits) >> type.bits);
}

std::uint64_t wide_product(Type type, std::uint64_t a, std::uint64_t b) {
  if (!type.is_signed) return a * b;
  return static_cast<std::uint64_t>(sign_extended(a, type.bits) * sign_extended(b, type.bits));
}

/// The divisor is not 0.
std::uint64_t quotient(Type type, std::uint64_t a, std::uint64_t b, bool remainder) {
  if (!type.is_signed) return remainder ? a % b : a / b;
  const std::int64_t x = sign_extended(a, type.bits);
  const std::int64_t y = sign_extended(b, type.bits);
  if (y == -1) return remainder ? 0 : std::uint64_t{0} - static_cast<std::uint64_t>(x);
  return static_cast<std::uint64_t>(remainder ? x % y : x / y);
}

/// Shifts by as much as there are bits, or more, shift all of them out.
std::uint64_t shifted_right(Type type, std::uint64_t a, std::uint64_t by) {
  if (type.is_signed) return static_cast<std::uint64_t>(sign_extended(a, type.bits) >> std::min<std::uint64_t>(by, 63));
  return by >= type.bits ? 0 : a >> by;
}

/// Bits beyond the field's are copies of its highest, or of the highest that there is; 0 without a sign.
std::uint64_t bit_field(Type type, std::uint64_t a, std::uint64_t place, std::uint64_t count) {
  if (count == 0) return 0;
  const std::uint64_t end = std::min<std::uint64_t>(place + count, type.bits);
  const bool is_negative = type.is_signed && (a >> (end - 1) & 1) != 0;
  if (place >= end) return is_negative ? ~std::uint64_t{0} : 0;
  const std::uint64_t field = (a & low_bits(static_cast<std::uint32_t>(end))) >> place;
  return is_negative ? field | ~low_bits(static_cast<std::uint32_t>(end - place)) : field;
}

}  // namespace

Lanes::Lanes(const Function& function) : values_(function.register_bits.size() * kLanes, 0xDEADBEEFDEADBEEF) {
  for (const auto& [number, value] : function.constants) fill(number, value);
}

void Lanes::fill(std::uint32_t number, std::uint64_t value) {
  std::fill_n(of(number), kLanes, value);
}

LaneMask Lanes::where(std::uint32_t predicate, LaneMask lanes) const {
  const std::uint64_t* const values = of(predicate);
  LaneMask found = 0;
  each_lane(lanes, [&](std::uint32_t lane) { found |= static_cast<LaneMask>(values[lane] & 1) << lane; });
  return found;
}

std::uint64_t lesser(Type type, std::uint64_t a, std::uint64_t b) {
  return less(type, b, a) ? b : a;
}
std::uint64_t greater(Type type, std::uint64_t a, std::uint64_t b) {
  return less(type, a, b) ? b : a;
}

std::string_view compute(const Instruction& instruction, Lanes& lanes, LaneMask active) {
  const Type type = instruction.type;
  const std::uint64_t bits = low_bits(type.bits);
  const std::uint64_t* const a = lanes.of(instruction.from[0]);
  const std::uint64_t* const b = lanes.of(instruction.from[1]);
  const std::uint64_t* const c = lanes.of(instruction.from[2]);
  std::uint64_t* const to = lanes.of(instruction.to[0]);
  const auto set = [&](const auto& value) {
    each_lane(active, [&](std::uint32_t i) { to[i] = value(i) & bits; });
    return std::string_view();
  };
  switch (instruction.op) {
    case Op::mov: return set([&](std::uint32_t i) { return a[i]; });
    case Op::add: return set([&](std::uint32_t i) { return a[i] + b[i]; });
    case Op::sub: return set([&](std::uint32_t i) { return a[i] - b[i]; });
    case Op::neg: return set([&](std::uint32_t i) { return std::uint64_t{0} - a[i]; });
    case Op::mul_lo: return set([&](std::uint32_t i) { return a[i] * b[i]; });
    case Op::mad_lo: return set([&](std::uint32_t i) { return a[i] * b[i] + c[i]; });
    case Op::mul_hi: return set([&](std::uint32_t i) { return high_product(type, a[i] & bits, b[i] & bits); });
    case Op::and_: return set([&](std::uint32_t i) { return a[i] & b[i]; });
    case Op::or_: return set([&](std::uint32_t i) { return a[i] | b[i]; });
    case Op::xor_: return set([&](std::uint32_t i) { return a[i] ^ b[i]; });
    case Op::not_: return set([&](std::uint32_t i) { return ~a[i]; });
    case Op::min: return set([&](std::uint32_t i) { return lesser(type, a[i], b[i]); });
    case Op::max: return set([&](std::uint32_t i) { return greater(type, a[i], b[i]); });
    case Op::shl:
      return set([&](std::uint32_t i) { return (b[i] & low_bits(32)) >= type.bits ? 0 : a[i] << (b[i] & 63); });
    case Op::shr: return set([&](std::uint32_t i) { return shifted_right(type, a[i] & bits, b[i] & low_bits(32)); });
    case Op::bfe: return set([&](std::uint32_t i) { return bit_field(type, a[i] & bits, b[i] & 0xFF, c[i] & 0xFF); });
    case Op::selp: return set([&](std::uint32_t i) { return (c[i] & 1) != 0 ? a[i] : b[i]; });
    case Op::setp:
      each_lane(active, [&](std::uint32_t i) { to[i] = compared(instruction.compare, type, a[i], b[i]); });
      return {};
    case Op::mul_wide:
      each_lane(active, [&](std::uint32_t i) {
        to[i] = wide_product(type, a[i] & bits, b[i] & bits) & low_bits(type.bits * 2u);
      });
      return {};
    case Op::cvt:
      each_lane(active, [&](std::uint32_t i) {
        const Type from = instruction.from_type;
        std::uint64_t value = a[i] & low_bits(from.bits);
        if (from.is_signed) value = static_cast<std::uint64_t>(sign_extended(value, from.bits));
        value &= bits;
        if (type.is_signed) value = static_cast<std::uint64_t>(sign_extended(value, type.bits));
        to[i] = value & low_bits(instruction.to_bits);
      });
      return {};
    case Op::div:
    case Op::rem: {
      bool by_zero = false;
      each_lane(active, [&](std::uint32_t i) {
        if ((b[i] & bits) == 0) return void(by_zero = true);
        to[i] = quotient(type, a[i] & bits, b[i] & bits, instruction.op == Op::rem) & bits;
      });
      return by_zero ? "division by zero" : "";
    }
    case Op::pack:
    case Op::unpack: {
      const std::uint32_t width = type.bits / instruction.count;
      each_lane(active, [&](std::uint32_t i) {
        std::uint64_t whole = instruction.op == Op::unpack ? a[i] : 0;
        for (std::uint32_t k = 0; k < instruction.count; ++k) {
          if (instruction.op == Op::pack) {
            whole |= (lanes.of(instruction.from[k])[i] & low_bits(width)) << (width * k);
          } else {
            lanes.of(instruction.to[k])[i] = whole >> (width * k) & low_bits(width);
          }
        }
        if (instruction.op == Op::pack) to[i] = whole;
      });
      return {};
    }
    default: return "an instruction that computes nothing";
  }
}

}  // namespace deltasync::emulator
