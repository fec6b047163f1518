// rice_class on every instruction set: the loops over all elements against what they mean, payloads that are the same
// whatever made them, and payloads that are what they always were.
#include <algorithm>

#include "base/hash.hpp"
#include "delta/class_codec.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

constexpr Dtype kFloats[] = {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2};

class ClassKernelTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = find_kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this CPU or build has no " << GetParam();
  }
  const ClassKernels& classes() const { return kernels_->classes; }
  const Kernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Isa, ClassKernelTest, ::testing::Values("scalar", "avx2", "avx512", "neon"),
                         [](const auto& param) { return std::string(param.param); });

TileShape shape_of(Dtype dtype, std::uint32_t rows, std::uint32_t cols) {
  return {rows, cols, static_cast<std::uint32_t>(dtype_bytes(dtype)), true, mantissa_bits(dtype)};
}

TEST_P(ClassKernelTest, ExponentsOfEveryDtype) {
  Random random(31);
  for (const Dtype dtype : kFloats) {
    const std::size_t width = dtype_bytes(dtype);
    for (std::uint32_t elements = 0; elements < 200; ++elements) {
      // Exactly as long as its elements, so that the sanitizer sees what is read behind them.
      const std::unique_ptr<std::byte[]> memory(new std::byte[elements * width]);
      for (std::size_t i = 0; i < elements * width; ++i) memory[i] = static_cast<std::byte>(random.next());
      const auto base = static_cast<std::uint32_t>(dtype == Dtype::f64 ? random.below(2047) : 0);
      const std::unique_ptr<std::uint8_t[]> out(new std::uint8_t[elements]);
      const unsigned log2 = static_cast<unsigned>(std::countr_zero(width));
      classes().exponents[log2](memory.get(), elements, mantissa_bits(dtype), base, out.get());
      for (std::uint32_t i = 0; i < elements; ++i) {
        std::uint64_t element = 0;
        std::memcpy(&element, &memory[i * width], width);
        element &= ~(std::uint64_t{1} << (width * 8 - 1));
        const auto exponent = static_cast<std::int64_t>(element >> mantissa_bits(dtype));
        ASSERT_EQ(out[i], std::clamp<std::int64_t>(exponent - base, 0, 255)) << to_string(dtype) << ' ' << i;
      }
    }
  }
}

std::vector<std::uint8_t> random_exponents(std::uint32_t elements, Random& random) {
  std::vector<std::uint8_t> out((elements + 63) / 64 * 64);
  const std::uint64_t around = random.below(256);
  const std::uint64_t spread = 1 + random.below(random.below(2) == 0 ? 10 : 256);
  for (std::uint8_t& e : out)
    e = static_cast<std::uint8_t>(std::min<std::uint64_t>(255, around + random.below(spread)));
  return out;
}

TEST_P(ClassKernelTest, CountsAreThoseOfEachExponent) {
  Random random(32);
  for (int trial = 0; trial < 600; ++trial) {
    const auto elements = static_cast<std::uint32_t>(trial % 60 == 0 ? kTileElementsMax : random.below(3000));
    const auto exponents = random_exponents(elements, random);
    auto lowest = static_cast<unsigned>(random.below(256));
    auto top = static_cast<unsigned>(random.below(256));
    if (lowest > top) std::swap(lowest, top);
    std::vector<std::uint32_t> expected(top - lowest + 1);
    for (std::uint32_t i = 0; i < elements; ++i) {
      if (exponents[i] <= top) ++expected[exponents[i] < lowest ? 0 : exponents[i] - lowest];
    }
    std::vector<std::uint32_t> counts(expected.size(), 77);
    classes().count(exponents.data(), elements, lowest, top, counts.data());
    ASSERT_EQ(counts, expected) << elements << " elements, " << lowest << " to " << top;
  }
}

/// So many alike that a byte of a vector could not count them.
TEST_P(ClassKernelTest, CountsOfALargestTileOfOneExponent) {
  const std::vector<std::uint8_t> exponents(kTileElementsMax, 77);
  for (const unsigned lowest : {70U, 77U}) {
    for (const unsigned top : {77U, 80U, 255U}) {
      std::vector<std::uint32_t> expected(top - lowest + 1);
      expected[77 - lowest] = kTileElementsMax;
      std::vector<std::uint32_t> counts(expected.size(), 5);
      classes().count(exponents.data(), kTileElementsMax, lowest, top, counts.data());
      ASSERT_EQ(counts, expected) << lowest << " to " << top;
    }
  }
}

TEST_P(ClassKernelTest, MasksGapsAndSelection) {
  Random random(33);
  for (int trial = 0; trial < 1000; ++trial) {
    const auto words = static_cast<std::uint32_t>(1 + random.below(trial % 50 == 0 ? kTileMaskWords : 30));
    const auto exponents = random_exponents(words * 64, random);
    ExponentRange range;
    range.low = exponents[random.below(exponents.size())];
    range.high =
        static_cast<std::uint8_t>(std::min<std::uint64_t>(255, range.low + random.below(random.below(2) * 9 + 1)));
    std::vector<std::uint64_t> mask(words, 77);
    classes().mask(exponents.data(), words, range, mask.data());
    std::vector<std::uint16_t> members;
    for (std::uint32_t i = 0; i < words * 64; ++i) {
      const bool inside = exponents[i] >= range.low && exponents[i] <= range.high;
      ASSERT_EQ(mask[i / 64] >> (i % 64) & 1, inside ? 1U : 0U) << i;
      if (inside) members.push_back(static_cast<std::uint16_t>(i));
    }
    std::vector<std::uint16_t> chosen;
    std::vector<std::uint16_t> expected;
    std::size_t next = 0;
    const std::uint64_t every = 1 + random.below(trial % 3 == 0 ? 2 : 100);
    for (std::size_t m = 0; m < members.size(); ++m) {
      if (random.below(every) != 0) continue;
      chosen.push_back(members[m]);
      expected.push_back(static_cast<std::uint16_t>(m - next));
      next = m + 1;
    }
    const auto count = static_cast<std::uint32_t>(chosen.size());
    std::vector<std::uint16_t> gaps(count);
    classes().gaps(mask.data(), chosen.data(), count, gaps.data());
    ASSERT_EQ(gaps, expected);
    std::vector<std::uint16_t> positions(count);
    ASSERT_TRUE(classes().select(mask.data(), words, gaps.data(), count, positions.data()));
    ASSERT_EQ(positions, chosen);
    // The first that is not there, right behind the last that is or far away.
    gaps.push_back(static_cast<std::uint16_t>(random.below(2) == 0 ? members.size() - next : 65'535));
    positions.push_back(0);
    ASSERT_FALSE(classes().select(mask.data(), words, gaps.data(), count + 1, positions.data()));
  }
}

/// A tile whose small elements change most, in one dtype.
struct Step {
  TileShape shape;
  std::vector<std::byte> before;
  std::vector<std::uint16_t> positions;
  std::vector<std::byte> diffs;
};

Step make_step(Dtype dtype, std::uint32_t rows, std::uint32_t cols, double density, Random& random) {
  Step step;
  step.shape = shape_of(dtype, rows, cols);
  const unsigned bits = step.shape.element_bytes * 8;
  const unsigned exponents = exponent_count(step.shape);
  const std::uint32_t spread = std::min(exponents - 1, 3U << random.below(8));
  const auto top = static_cast<std::uint32_t>(spread + random.below(exponents - spread));
  step.before.resize(step.shape.raw_bytes());
  for (std::uint32_t i = 0; i < step.shape.elements(); ++i) {
    const auto below =
        std::min(spread, static_cast<std::uint32_t>(std::countr_zero(random.next() | 1ULL << 40)) * (1 + spread / 20));
    const std::uint64_t exponent = top - below;
    const std::uint64_t sign = random.below(2) << (bits - 1);
    const std::uint64_t mantissa = random.below(std::uint64_t{1} << step.shape.mantissa_bits);
    const std::uint64_t old = sign | exponent << step.shape.mantissa_bits | mantissa;
    std::memcpy(&step.before[std::size_t{i} * step.shape.element_bytes], &old, step.shape.element_bytes);
    if (i != 0 && random.uniform() > density * (1 + 3 * below)) continue;
    std::uint64_t diff = random.below(9) == 0 ? 1 + random.below(30) : 1;
    if (random.below(2) == 0) diff = 0 - diff;
    const auto* const bytes = reinterpret_cast<const std::byte*>(&diff);
    step.positions.push_back(static_cast<std::uint16_t>(i));
    step.diffs.insert(step.diffs.end(), bytes, bytes + step.shape.element_bytes);
  }
  return step;
}

TEST_P(ClassKernelTest, PayloadsDoNotDependOnTheInstructionSet) {
  Random random(34);
  ClassEncodeScratch scratch;
  ClassEncodeScratch scalar_scratch;
  const std::pair<std::uint32_t, std::uint32_t> shapes[] = {{1, 1}, {7, 3}, {64, 40}, {1, 5000}, {256, 256}};
  for (const Dtype dtype : kFloats) {
    for (const auto& [rows, cols] : shapes) {
      for (const double density : {0.0, 0.002, 0.02, 0.3}) {
        const Step step = make_step(dtype, rows, cols, density, random);
        const ChangedElements changed{step.positions.data(), step.diffs.data(),
                                      static_cast<std::uint32_t>(step.positions.size())};
        const auto encode = [&](const Kernels& kernels, ClassEncodeScratch& memory, TileRecord& record) {
          std::vector<std::byte> out;
          encode_class(kernels, step.shape, changed, step.before.data(), step.shape.row_bytes(), ~std::size_t{0},
                       memory, record, out);
          return out;
        };
        TileRecord record;
        TileRecord expected_record;
        const auto payload = encode(*kernels_, scratch, record);
        ASSERT_EQ(payload, encode(scalar_kernels(), scalar_scratch, expected_record)) << to_string(dtype);
        ASSERT_EQ(record.rice_k, expected_record.rice_k);
        if (payload.empty()) continue;
        record.payload = payload;
        const auto decoded = decode_class(*kernels_, step.shape, record, step.before.data(), step.shape.row_bytes());
        ASSERT_TRUE(decoded.ok()) << decoded.error().to_string();
        ASSERT_EQ(decoded->count, changed.count);
        ASSERT_TRUE(std::equal(step.positions.begin(), step.positions.end(), decoded->positions));
        ASSERT_EQ(std::memcmp(decoded->values, step.diffs.data(), step.diffs.size()), 0);
      }
    }
  }
}

/// The last mask word of a tile of ten elements, decoded over one of nine: what is behind the tile is in no class,
/// though it looks like the smallest exponent.
TEST_P(ClassKernelTest, NoPositionIsBehindTheTile) {
  for (const Dtype dtype : kFloats) {
    const TileShape ten = shape_of(dtype, 1, 10);
    const std::vector<std::byte> zeros(ten.raw_bytes());
    const std::vector<std::byte> diffs = [&] {
      std::vector<std::byte> one(ten.element_bytes);
      one[0] = std::byte{1};
      return one;
    }();
    const std::uint16_t last = 9;
    ClassEncodeScratch scratch;
    TileRecord record;
    std::vector<std::byte> payload;
    ASSERT_TRUE(encode_class(*kernels_, ten, {&last, diffs.data(), 1}, zeros.data(), ten.raw_bytes(), ~std::size_t{0},
                             scratch, record, payload));
    record.payload = payload;
    ASSERT_TRUE(decode_class(*kernels_, ten, record, zeros.data(), ten.raw_bytes()).ok());
    const TileShape nine = shape_of(dtype, 1, 9);
    const auto decoded = decode_class(*kernels_, nine, record, zeros.data(), nine.raw_bytes());
    ASSERT_FALSE(decoded.ok()) << to_string(dtype);
    EXPECT_NE(decoded.error().message().find("last element of its class"), std::string::npos);
  }
}

TEST(ClassPayloads, EveryExponentUpToTheTopHasOneClass) {
  for (unsigned shift = 0; shift <= kClassShiftMax; ++shift) {
    for (unsigned classes = 1; classes <= kClassesMax; ++classes) {
      for (std::uint32_t top = 0; top <= 254; ++top) {
        ClassHeader header;
        header.classes = classes;
        header.shift = shift;
        header.top = top;
        const auto ranges = class_ranges(header, 0);
        for (std::uint32_t e = 0; e <= 255; ++e) {
          const auto has = std::count_if(ranges.begin(), ranges.begin() + classes,
                                         [e](const ExponentRange& r) { return r.low <= e && e <= r.high; });
          ASSERT_EQ(has, e <= top ? 1 : 0) << e << " of " << top << " in " << classes << " of 2^" << shift;
        }
      }
    }
  }
}

/// The Rice parameter of c changes among n is the smallest k with 2^k × c/n ≥ 0.481.
TEST(ClassPayloads, TheParameterFollowsTheDensity) {
  const TileShape shape = shape_of(Dtype::bf16, 1, 1000);
  const std::vector<std::byte> zeros(shape.raw_bytes());
  const std::pair<std::uint32_t, unsigned> cases[] = {{1000, 0}, {481, 0}, {480, 1}, {241, 1},
                                                      {240, 2},  {61, 3},  {60, 4},  {1, 9}};
  for (const auto& [count, k] : cases) {
    std::vector<std::uint16_t> positions;
    std::vector<std::byte> diffs;
    for (std::uint32_t i = 0; i < count; ++i) {
      positions.push_back(static_cast<std::uint16_t>(i));
      diffs.insert(diffs.end(), {std::byte{1}, std::byte{0}});
    }
    ClassEncodeScratch scratch;
    TileRecord record;
    std::vector<std::byte> payload;
    ASSERT_TRUE(encode_class(shape, {positions.data(), diffs.data(), count}, zeros.data(), shape.row_bytes(),
                             ~std::size_t{0}, scratch, record, payload));
    ByteSpan rest = payload;
    const auto header = read_class_header(shape, count, rest);
    ASSERT_TRUE(header.ok()) << header.error().to_string();
    EXPECT_EQ(header->k[0], k) << count;
  }
}

/// Hashes that were taken before any of these loops was a kernel: the encoder's choices are free, but to change them
/// is a decision.
TEST(ClassPayloads, AreWhatTheyWere) {
  Random random(35);
  ClassEncodeScratch scratch;
  std::vector<std::uint64_t> hashes;
  for (const Dtype dtype : kFloats) {
    std::vector<std::byte> all;
    for (const auto& [rows, cols] : {std::pair{1U, 9U}, {33U, 40U}, {256U, 256U}, {1U, 3000U}}) {
      for (const double density : {0.0, 0.002, 0.02, 0.3}) {
        const Step step = make_step(dtype, rows, cols, density, random);
        TileRecord record;
        encode_class(step.shape,
                     {step.positions.data(), step.diffs.data(), static_cast<std::uint32_t>(step.positions.size())},
                     step.before.data(), step.shape.row_bytes(), ~std::size_t{0}, scratch, record, all);
        all.push_back(static_cast<std::byte>(record.rice_k));
      }
    }
    hashes.push_back(xxh3_64(all));
  }
  EXPECT_EQ(hashes, (std::vector<std::uint64_t>{17816970514873812399U, 6872154778339123875U, 2172768151398073555U,
                                                14774228922805027443U, 12313754417326377713U, 6838562236120213302U}));
}

}  // namespace
}  // namespace deltasync::delta::test
