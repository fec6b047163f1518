// Loads, stores and atomics.
#include "tests/gpu/emulator/sampled.hpp"

namespace deltasync::emulator {
namespace {

/// A parameter's address is taken, and moved; each lane has its own.
TEST(Accesses, ParametersAreFoundByAddress) {
  const auto store = [](const std::string& load) {
    return "\tmov.b64 \t%rd1, test_param_0;\n\tmul.wide.u32 \t%rd2, %r10, 8;\n\tand.b64 \t%rd3, %rd2, 8;\n"
           "\tadd.s64 \t%rd1, %rd1, %rd3;\n\tadd.s64 \t%rd2, %rd11, %rd2;\n" +
           load + "\tst.global.u64 \t[%rd2], %rd4;\n";
  };
  Machine machine(store("\tld.param.u64 \t%rd4, [%rd1];\n"));
  const auto* const in = machine.up(std::vector<u64>(1));
  const auto* const out = machine.up(std::vector<u64>(32));
  ASSERT_FALSE(machine.run(in, out).has_value());
  const auto got = machine.down<u64>(out, 32);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(got[i], reinterpret_cast<std::uintptr_t>(i % 2 == 0 ? in : out));
  Machine beyond(store("\tld.param.u64 \t%rd4, [%rd1+8];\n"));
  const auto fault = beyond.run(in, out);
  ASSERT_TRUE(fault.has_value());
  EXPECT_NE(fault->text.find("out of the parameters' bounds"), std::string::npos) << fault->text;
}

/// Every width, with and without a sign, and vectors: what is loaded is stored again.
TEST(Accesses, LoadsAndStores) {
  std::vector<u64> words(32 * 4);
  std::mt19937_64 random(3);
  for (u64& word : words) word = random();
  const std::string begin = R"(
	mul.wide.u32 	%rd12, %r10, 32;
	add.s64 	%rd1, %rd10, %rd12;
	add.s64 	%rd2, %rd11, %rd12;
)";
  const auto run = [&](const std::string& lines) {
    Machine machine(begin + lines);
    const auto* const out = machine.up(std::vector<u64>(words.size()));
    const auto fault = machine.run(machine.up(words), out);
    EXPECT_FALSE(fault.has_value()) << fault->text;
    return machine.down<u64>(out, words.size());
  };
  EXPECT_EQ(run(R"(
	ld.global.v2.u64 	{%rd3, %rd4}, [%rd1];
	ld.global.v4.u32 	{%r1, %r2, %r3, %r4}, [%rd1+16];
	st.global.v2.u64 	[%rd2], {%rd3, %rd4};
	st.v4.u32 	[%rd2+16], {%r1, %r2, %r3, %r4};
)"),
            words);
  EXPECT_EQ(run(R"(
	ld.global.nc.u64 	%rd3, [%rd1];
	ld.u32 	%r1, [%rd1+8];
	ld.global.u16 	%rs1, [%rd1+12];
	ld.global.u8 	%rs2, [%rd1+14];
	ld.global.s8 	%rs3, [%rd1+15];
	ld.global.v2.u32 	{%r2, %r3}, [%rd1+16];
	ld.global.v2.u16 	{%rs4, %rs5}, [%rd1+24];
	ld.global.v4.u8 	{%rs6, %rs7, %rs8, %rs9}, [%rd1+28];
	st.global.u64 	[%rd2], %rd3;
	st.global.u32 	[%rd2+8], %r1;
	st.u16 	[%rd2+12], %rs1;
	st.global.u8 	[%rd2+14], %rs2;
	st.global.u8 	[%rd2+15], %rs3;
	st.global.v2.u32 	[%rd2+16], {%r2, %r3};
	st.global.v2.u16 	[%rd2+24], {%rs4, %rs5};
	st.global.v4.u8 	[%rd2+28], {%rs6, %rs7, %rs8, %rs9};
)"),
            words);
  const auto extended = run(R"(
	ld.global.s8 	%r1, [%rd1+7];
	cvt.s64.s32 	%rd3, %r1;
	ld.global.s16 	%rd4, [%rd1+6];
	ld.global.s32 	%rd5, [%rd1+4];
	st.global.u64 	[%rd2], %rd3;
	st.global.u64 	[%rd2+8], %rd4;
	st.global.u64 	[%rd2+16], %rd5;
)");
  for (std::size_t i = 0; i < words.size(); i += 4) {
    const auto word = static_cast<s64>(words[i]);
    EXPECT_EQ(static_cast<s64>(extended[i]), word >> 56);
    EXPECT_EQ(static_cast<s64>(extended[i + 1]), word >> 48);
    EXPECT_EQ(static_cast<s64>(extended[i + 2]), word >> 32);
  }
}

template <class T>
using Atomic = std::pair<std::string, std::function<T(T, T)>>;

/// Each thread does it to a word of its own: what it returns and leaves there. The last is cas, which compares with the
/// second operand and sets the third.
TEST(Accesses, Atomics) {
  for_types<s32, u32, s64, u64>([]<class T>(T) {
    const std::string bits = bits_name<T>();
    const std::string type = type_name<T>();
    const std::vector<Atomic<T>> all{{"add." + type, [](T a, T b) { return wrapped<T>(std::plus<u64>(), a, b); }},
                                     {"min." + type, [](T a, T b) { return std::min(a, b); }},
                                     {"max." + type, [](T a, T b) { return std::max(a, b); }},
                                     {"and." + bits, [](T a, T b) { return static_cast<T>(a & b); }},
                                     {"or." + bits, [](T a, T b) { return static_cast<T>(a | b); }},
                                     {"xor." + bits, [](T a, T b) { return static_cast<T>(a ^ b); }},
                                     {"exch." + bits, [](T, T b) { return b; }}};
    for (const auto& [name, expected] : all) {
      const auto values = sample();
      const std::string at = "[%rd12], " + register_name<T>(2) + ";\n";
      std::string read_again = "\tld.global." + type + " \t" + register_name<T>(9) + ", [%rd12];\n";
      if (sizeof(T) < 8) read_again += "\tcvt.u64.u32 \t%rd9, %r9;\n";
      const bool is_exch = name.starts_with("exch");
      const auto once =
          computed("\tatom.global." + name + " \t" + register_name<T>(4) + ", " + at + read_again, values);
      const auto reduced = is_exch ? once : computed("\tred.global." + name + " \t" + at + read_again, values);
      std::string old = "\tatom.global." + name + " \t" + register_name<T>(9) + ", " + at;
      if (sizeof(T) < 8) old += "\tcvt.u64.u32 \t%rd9, %r9;\n";
      const auto returned = computed(old, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        using U = std::make_unsigned_t<T>;
        const auto a = static_cast<T>(values[i].a);
        const auto b = static_cast<T>(values[i].b);
        ASSERT_EQ(once[i], static_cast<U>(expected(a, b))) << name << " of " << a << ", " << b;
        ASSERT_EQ(reduced[i], once[i]) << name;
        ASSERT_EQ(returned[i], static_cast<U>(a)) << name;
      }
    }
  });
  std::vector<Values> values = sample();
  for (std::size_t i = 0; i < values.size(); i += 2) values[i].b = values[i].a;
  const auto got =
      computed("\tatom.global.cas.b64 \t%rd4, [%rd12], %rd2, %rd3;\n\tld.global.u64 \t%rd9, [%rd12];\n", values);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(got[i], values[i].a == values[i].b ? values[i].c : values[i].a);
}

TEST(Accesses, ThreadsAddToOneWord) {
  Machine machine(R"(
	cvt.u64.u32 	%rd1, %r10;
	atom.global.add.u64 	%rd2, [%rd10], %rd1;
)",
                  256, 9);
  const auto* const sum = machine.up(std::vector<u64>{100});
  ASSERT_FALSE(machine.run(sum, nullptr).has_value());
  EXPECT_EQ(machine.down<u64>(sum, 1)[0], 100 + 9 * 255 * 256 / 2);
}

}  // namespace
}  // namespace deltasync::emulator
