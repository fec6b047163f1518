// Instructions over a sample of numbers, beside what the host's compiler makes of the same.
#pragma once

#include <functional>
#include <random>
#include <type_traits>

#include "tests/gpu/emulator/machine.hpp"

namespace deltasync::emulator {

template <class T>
std::string type_name() {
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(sizeof(T) * 8);
}
template <class T>
std::string bits_name() {
  return "b" + std::to_string(sizeof(T) * 8);
}
/// Of an operand: 1 to 3, or the result, 9.
template <class T>
std::string register_name(int number) {
  return (sizeof(T) == 8 ? "%rd" : sizeof(T) == 4 ? "%r" : "%rs") + std::to_string(number);
}

template <class... Ts, class Fn>
void for_types(const Fn& fn) {
  (fn(Ts{}), ...);
}
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

struct Values {
  u64 a = 0;
  u64 b = 0;
  u64 c = 0;
};

/// All pairs of numbers at which something changes, and some others.
inline std::vector<Values> sample() {
  std::vector<u64> edges{0, 1, 2, 7, 15, 16, 31, 32, 33, 63, 64, 65, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF};
  for (const u64 large : {u64{0x7FFFFFFF}, u64{0x80000000}, u64{0xFFFFFFFF}, u64{1} << 63, ~u64{0} >> 1}) {
    edges.push_back(large);
    edges.push_back(~large);
  }
  std::mt19937_64 random(5);
  std::vector<Values> values;
  for (const u64 a : edges) {
    for (const u64 b : edges) values.push_back({a, b, random()});
  }
  for (int i = 0; i < 200; ++i) values.push_back({random(), random(), random()});
  while (values.size() % 32 != 0) values.push_back({1, 1, 1});
  return values;
}

/// What the lines leave in %rd9, with the operands in registers 1 to 3 of each width.
inline std::vector<u64> computed(const std::string& lines, const std::vector<Values>& values) {
  std::string body = R"(
	mad.lo.s32 	%r12, %r11, 32, %r10;
	mul.wide.u32 	%rd12, %r12, 24;
	add.s64 	%rd12, %rd10, %rd12;
)";
  for (const char* const n : {"1", "2", "3"}) {
    const std::string name(n);
    body += "\tld.global.u64 \t%rd" + name + ", [%rd12+" + std::to_string((n[0] - '1') * 8) + "];\n";
    body += "\tcvt.u32.u64 \t%r" + name + ", %rd" + name + ";\n\tcvt.u16.u64 \t%rs" + name + ", %rd" + name + ";\n";
  }
  body += lines + R"(
	mul.wide.u32 	%rd13, %r12, 8;
	add.s64 	%rd13, %rd11, %rd13;
	st.global.u64 	[%rd13], %rd9;
)";
  Machine machine(body, 32, static_cast<u32>(values.size() / 32));
  const auto* const in = machine.up(values);
  const auto* const out = machine.up(std::vector<u64>(values.size()));
  const auto fault = machine.run(in, out);
  EXPECT_FALSE(fault.has_value()) << fault->text;
  return machine.down<u64>(out, values.size());
}

/// "op.type %r9, %r1, %r2": as much as fn(a, b, c) says, where `holds` does.
template <class T, class Fn>
void expect_same(
    const std::string& op, int operands, const Fn& fn,
    const std::function<bool(T, T)>& holds = [](T, T) { return true; }) {
  std::vector<Values> values = sample();
  for (Values& v : values) {
    if (!holds(static_cast<T>(v.a), static_cast<T>(v.b))) v = {7, 3, 1};
  }
  std::string line = "\t" + op + " \t" + register_name<T>(9);
  for (int i = 1; i <= operands; ++i) line += ", " + register_name<T>(i);
  line += ";\n";
  if (sizeof(T) < 8) line += "\tcvt.u64.u" + std::to_string(sizeof(T) * 8) + " \t%rd9, " + register_name<T>(9) + ";\n";
  const auto got = computed(line, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto a = static_cast<T>(values[i].a);
    const auto b = static_cast<T>(values[i].b);
    const auto c = static_cast<T>(values[i].c);
    const auto expected = static_cast<std::make_unsigned_t<T>>(fn(a, b, c));
    ASSERT_EQ(got[i], expected) << op << " of " << +a << ", " << +b << ", " << +c;
  }
}

/// Without the overflow that C++ does not define.
template <class T>
T wrapped(std::function<u64(u64, u64)> fn, T a, T b) {
  return static_cast<T>(fn(static_cast<u64>(a), static_cast<u64>(b)));
}

}  // namespace deltasync::emulator
