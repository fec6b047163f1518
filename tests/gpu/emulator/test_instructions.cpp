// Each instruction that computes against the same computation by the host's compiler.
#include <limits>
#include <numeric>

#include "tests/gpu/emulator/sampled.hpp"

namespace deltasync::emulator {
namespace {

TEST(Instructions, Arithmetic) {
  for_types<s16, s32, s64, u16, u32, u64>([]<class T>(T) {
    const std::string type = "." + type_name<T>();
    expect_same<T>("add" + type, 2, [](T a, T b, T) { return wrapped<T>(std::plus<u64>(), a, b); });
    expect_same<T>("sub" + type, 2, [](T a, T b, T) { return wrapped<T>(std::minus<u64>(), a, b); });
    expect_same<T>("mul.lo" + type, 2, [](T a, T b, T) { return wrapped<T>(std::multiplies<u64>(), a, b); });
    expect_same<T>("mad.lo" + type, 3, [](T a, T b, T c) {
      return wrapped<T>(std::plus<u64>(), wrapped<T>(std::multiplies<u64>(), a, b), c);
    });
    expect_same<T>("min" + type, 2, [](T a, T b, T) { return std::min(a, b); });
    expect_same<T>("max" + type, 2, [](T a, T b, T) { return std::max(a, b); });
    const auto divides = [](T a, T b) {
      return b != 0 && !(std::is_signed_v<T> && a == std::numeric_limits<T>::min() && b == static_cast<T>(-1));
    };
    expect_same<T>(
        "div" + type, 2, [](T a, T b, T) { return static_cast<T>(a / b); }, divides);
    expect_same<T>(
        "rem" + type, 2, [](T a, T b, T) { return static_cast<T>(a % b); }, divides);
    if (std::is_signed_v<T>) {
      expect_same<T>("neg" + type, 1, [](T a, T, T) { return wrapped<T>(std::minus<u64>(), T{0}, a); });
    }
  });
}

TEST(Instructions, ProductsOfTwiceTheWidth) {
  __extension__ using Wide = __int128;
  __extension__ using UnsignedWide = unsigned __int128;
  for_types<s32, u32>([]<class T>(T) {
    using W = std::conditional_t<std::is_signed_v<T>, s64, u64>;
    expect_same<T>("mul.hi." + type_name<T>(), 2, [](T a, T b, T) { return static_cast<T>(W{a} * W{b} >> 32); });
    const auto values = sample();
    const auto got = computed("\tmul.wide." + type_name<T>() + " \t%rd9, %r1, %r2;\n", values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const W expected = W{static_cast<T>(values[i].a)} * W{static_cast<T>(values[i].b)};
      ASSERT_EQ(got[i], static_cast<u64>(expected));
    }
  });
  expect_same<s64>("mul.hi.s64", 2, [](s64 a, s64 b, s64) { return static_cast<s64>(Wide{a} * b >> 64); });
  expect_same<u64>("mul.hi.u64", 2, [](u64 a, u64 b, u64) { return static_cast<u64>(UnsignedWide{a} * b >> 64); });
}

TEST(Instructions, BitByBit) {
  for_types<u16, u32, u64>([]<class T>(T) {
    const std::string type = "." + bits_name<T>();
    expect_same<T>("and" + type, 2, [](T a, T b, T) { return static_cast<T>(a & b); });
    expect_same<T>("or" + type, 2, [](T a, T b, T) { return static_cast<T>(a | b); });
    expect_same<T>("xor" + type, 2, [](T a, T b, T) { return static_cast<T>(a ^ b); });
    expect_same<T>("not" + type, 1, [](T a, T, T) { return static_cast<T>(~a); });
    expect_same<T>("mov" + type, 1, [](T a, T, T) { return a; });
  });
}

/// The count is a number of 32 bits, of any size.
TEST(Instructions, Shifts) {
  const auto values = sample();
  for_types<s16, s32, s64, u16, u32, u64>([&]<class T>(T) {
    constexpr u32 kBits = sizeof(T) * 8;
    const std::string operands = " \t" + register_name<T>(9) + ", " + register_name<T>(1) + ", %r2;\n";
    std::string widen;
    if (kBits < 64) widen = "\tcvt.u64.u" + std::to_string(kBits) + " \t%rd9, " + register_name<T>(9) + ";\n";
    const auto left = computed("\tshl." + bits_name<T>() + operands + widen, values);
    const auto right = computed("\tshr." + type_name<T>() + operands + widen, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      using U = std::make_unsigned_t<T>;
      const auto a = static_cast<T>(values[i].a);
      const auto by = static_cast<u32>(values[i].b);
      const T all_out = a < 0 ? static_cast<T>(-1) : T{0};
      ASSERT_EQ(left[i], by >= kBits ? U{0} : static_cast<U>(static_cast<u64>(static_cast<U>(a)) << by))
          << +a << " << " << by;
      ASSERT_EQ(right[i], static_cast<U>(by >= kBits ? all_out : static_cast<T>(a >> by))) << +a << " >> " << by;
    }
  });
}

/// Place and count are the lowest eight bits of numbers of 32.
TEST(Instructions, BitFields) {
  const auto values = sample();
  for_types<s32, s64, u32, u64>([&]<class T>(T) {
    constexpr u32 kBits = sizeof(T) * 8;
    std::string lines = "\tshr.u32 \t%r3, %r2, 8;\n\tbfe." + type_name<T>() + " \t" + register_name<T>(9) + ", " +
                        register_name<T>(1) + ", %r2, %r3;\n";
    if (kBits < 64) lines += "\tcvt.u64.u32 \t%rd9, %r9;\n";
    const auto got = computed(lines, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto a = static_cast<T>(values[i].a);
      const u32 place = values[i].b & 0xFF;
      const u32 count = values[i].b >> 8 & 0xFF;
      // PTX ISA, "bfe": bits behind the last one are copies of the field's highest, or 0 without a sign.
      const u32 last = std::min(place + count - 1, kBits - 1);
      const bool sign = std::is_signed_v<T> && count != 0 && (a >> last & 1) != 0;
      u64 expected = 0;
      for (u32 bit = 0; bit < kBits; ++bit) {
        const bool is_in = bit < count && place + bit < kBits;
        expected |= u64{is_in ? (a >> (place + bit) & 1) != 0 : sign} << bit;
      }
      ASSERT_EQ(got[i], expected) << +a << " from " << place << ", " << count;
    }
  });
}

TEST(Instructions, ComparesAndSelects) {
  for_types<s16, s32, s64, u16, u32, u64>([]<class T>(T) {
    const std::vector<std::pair<std::string, std::function<bool(T, T)>>> all{
        {"eq", std::equal_to<T>()},   {"ne", std::not_equal_to<T>()}, {"lt", std::less<T>()},
        {"le", std::less_equal<T>()}, {"gt", std::greater<T>()},      {"ge", std::greater_equal<T>()}};
    for (const auto& [name, compare] : all) {
      const std::string operands = " \t%p1, " + register_name<T>(1) + ", " + register_name<T>(2) + ";\n";
      // The first by a select, the second by guards, one of which is negated.
      const std::string lines = "\tsetp." + name + "." + type_name<T>() + operands + R"(
	selp.u64 	%rd4, 16, 0, %p1;
	mov.u64 	%rd5, 2;
	@%p1 mov.u64 	%rd5, 1;
	@!%p1 add.s64 	%rd5, %rd5, 1;
	add.s64 	%rd9, %rd4, %rd5;
)";
      const auto values = sample();
      const auto got = computed(lines, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bool is_true = compare(static_cast<T>(values[i].a), static_cast<T>(values[i].b));
        ASSERT_EQ(got[i], is_true ? 17u : 3u) << name << " " << values[i].a << ", " << values[i].b;
      }
    }
  });
}

TEST(Instructions, Predicates) {
  const auto values = sample();
  const auto got = computed(R"(
	setp.lt.s64 	%p1, %rd1, %rd2;
	setp.lt.u64 	%p2, %rd1, %rd2;
	and.pred 	%p3, %p1, %p2;
	or.pred 	%p4, %p1, %p2;
	xor.pred 	%p5, %p1, %p2;
	not.pred 	%p6, %p1;
	mov.pred 	%p7, -1;
	and.pred 	%p7, %p7, %p2;
	mov.u64 	%rd9, 0;
	@%p3 add.s64 	%rd9, %rd9, 1;
	@%p4 add.s64 	%rd9, %rd9, 2;
	@%p5 add.s64 	%rd9, %rd9, 4;
	@%p6 add.s64 	%rd9, %rd9, 8;
	@%p7 add.s64 	%rd9, %rd9, 16;
)",
                            values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool a = static_cast<s64>(values[i].a) < static_cast<s64>(values[i].b);
    const bool b = values[i].a < values[i].b;
    ASSERT_EQ(got[i], (a && b) * 1u + (a || b) * 2u + (a != b) * 4u + !a * 8u + b * 16u);
  }
}

template <class To, class From>
void expect_converts() {
  const auto values = sample();
  // Bytes are in registers of 16 bits.
  const std::string to = register_name<To>(9);
  std::string lines =
      "\tcvt." + type_name<To>() + "." + type_name<From>() + " \t" + to + ", " + register_name<From>(1) + ";\n";
  constexpr u32 kRegisterBits = sizeof(To) == 1 ? 16 : sizeof(To) * 8;
  if (kRegisterBits < 64) lines += "\tcvt.u64.u" + std::to_string(kRegisterBits) + " \t%rd9, " + to + ";\n";
  const auto got = computed(lines, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto expected = static_cast<s64>(static_cast<To>(static_cast<From>(values[i].a)));
    ASSERT_EQ(got[i], static_cast<u64>(expected) & low_bits(kRegisterBits)) << lines << values[i].a;
  }
}

TEST(Instructions, Conversions) {
  for_types<s8, s16, s32, s64, u8, u16, u32, u64>([]<class From>(From) {
    for_types<s8, s16, s32, s64, u8, u16, u32, u64>([]<class To>(To) { expect_converts<To, From>(); });
  });
}

TEST(Instructions, PacksAndUnpacks) {
  const auto values = sample();
  const auto got = computed(R"(
	mov.b64 	{%r4, %r5}, %rd1;
	mov.b32 	{%rs4, %rs5}, %r5;
	mov.b64 	{%rs6, %rs7, %rs8, %rs9}, %rd2;
	mov.b32 	%r6, {%rs9, %rs4};
	{ .reg .b32 tmp; mov.b64 {tmp, %r7}, %rd1; }
	sub.s32 	%r7, %r7, %r5;
	add.s32 	%r4, %r4, %r7;
	mov.b64 	%rd9, {%r4, %r6};
)",
                            values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Values& v = values[i];
    ASSERT_EQ(got[i], (v.a & 0xFFFFFFFF) | v.b >> 48 << 32 | (v.a >> 32 & 0xFFFF) << 48);
  }
}

/// What is not known is named, with its line.
TEST(Instructions, OthersAreRefusedByName) {
  for (const std::string line :
       {"tex.2d.v4.f32.f32 \t{%r1, %r2, %r3, %r4}, [%rd1, {%r1, %r2}];", "add.f32 \t%r1, %r2, %r3;",
        "ld.volatile.global.u32 \t%r1, [%rd1];", "mov.u32 \t%r1, %smid;", "add.sat.s32 \t%r1, %r2, %r3;",
        "call.uni \tprintf, (%r1);", "bar.sync \t1;", "atom.global.inc.u32 \t%r1, [%rd1], %r2;",
        "shfl.down.b32 \t%r1, %r2, %r3, %r4;", "mov.u32 \t%r1, %r99;"}) {
    const auto read = read_ptx(Machine::kernel("\tadd.s32 \t%r1, %r2, %r3;\n\t" + line));
    ASSERT_FALSE(read.ok()) << line;
    EXPECT_NE(read.error().message().find(line), std::string::npos) << read.error().message();
    EXPECT_NE(read.error().message().find("PTX line 19"), std::string::npos) << read.error().message();
  }
  EXPECT_FALSE(read_ptx(".version 9.0\n.func helper()\n{\n\tret;\n}\n").ok());
  EXPECT_FALSE(read_ptx(Machine::kernel("\tbra.uni \t$nowhere;")).ok());
  EXPECT_FALSE(read_ptx(Machine::kernel("\t.local .b8 \tdepot[16];")).ok());
}

}  // namespace
}  // namespace deltasync::emulator
