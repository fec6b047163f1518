// Every instruction set's decoder loops against what the planes mean: random contents, widths, densities and tails.
#include <map>
#include <memory>

#include "delta/kernel_scalar.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

class DecodeKernelTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const Kernels* const found = find_kernels(GetParam());
    if (found == nullptr) GTEST_SKIP() << "this CPU or build has no " << GetParam();
    kernels_ = &found->decode;
  }
  const DecodeKernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Isa, DecodeKernelTest, ::testing::Values("scalar", "avx2", "avx512", "neon"),
                         [](const auto& param) { return std::string(param.param); });

/// A string of bits with the slack behind it that decoders have.
class Plane {
 public:
  void put(std::uint64_t value, unsigned bits) {
    for (unsigned b = 0; b < bits; ++b, ++bits_) {
      if (bits_ % 8 == 0) bytes_.push_back(std::byte{0});
      bytes_.back() |= static_cast<std::byte>(((value >> b) & 1) << (bits_ % 8));
    }
  }
  void put_zeros_and_one(std::uint64_t zeros) {
    for (; zeros != 0; --zeros) put(0, 1);
    put(1, 1);
  }
  /// Behind the plane stand bits that are none of its own.
  const std::byte* finish(Random& random) {
    size_ = bytes_.size();
    for (std::size_t i = 0; i < kSlack; ++i) bytes_.push_back(static_cast<std::byte>(random.next()));
    return bytes_.data();
  }
  std::size_t size() const { return size_; }
  std::uint64_t bits() const { return bits_; }

 private:
  std::vector<std::byte> bytes_;
  std::uint64_t bits_ = 0;
  std::size_t size_ = 0;
};

std::uint64_t all_ones(std::size_t width) {
  return width == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (width * 8)) - 1;
}

TEST_P(DecodeKernelTest, CountsTheOnesOfAPlaneAlone) {
  Random random(21);
  for (std::size_t size = 0; size < 300; ++size) {
    const std::unique_ptr<std::byte[]> plane(new std::byte[size]);
    std::uint64_t ones = 0;
    for (std::size_t i = 0; i < size; ++i) {
      plane[i] = static_cast<std::byte>(random.next());
      for (unsigned b = 0; b < 8; ++b) ones += (static_cast<unsigned>(plane[i]) >> b) & 1;
    }
    ASSERT_EQ(kernels_->count_ones(plane.get(), size), ones);
  }
}

/// So many that a byte of a vector could not count them.
TEST_P(DecodeKernelTest, CountsALongPlaneOfOnes) {
  for (const std::size_t size : {496U, 512U, 528U, 20001U}) {
    const std::vector<std::byte> plane(size, std::byte{0xFF});
    ASSERT_EQ(kernels_->count_ones(plane.data(), size), 8 * size);
  }
}

/// Gaps, some of which a hostile peer would send: their sum is not bounded by the tile.
TEST_P(DecodeKernelTest, PositionsAreTheSumsOfTheGaps) {
  Random random(22);
  for (int trial = 0; trial < 1500; ++trial) {
    const auto k = static_cast<unsigned>(random.below(kRiceKMax + 1));
    const auto count = static_cast<std::uint32_t>(1 + random.below(trial % 10 == 0 ? 4000 : 200));
    const std::uint64_t quotient_below = 1 + random.below(trial % 7 == 0 ? 300 : 4);
    Plane lows;
    Plane quotients;
    std::vector<std::uint64_t> expected;
    std::uint64_t next = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t low = random.next() & ((std::uint64_t{1} << k) - 1);
      const std::uint64_t quotient = random.below(quotient_below);
      lows.put(low, k);
      quotients.put_zeros_and_one(quotient);
      expected.push_back(next + (quotient << k | low));
      next = expected.back() + 1;
    }
    const std::byte* const low_bytes = lows.finish(random);
    const std::byte* const quotient_bytes = quotients.finish(random);
    std::vector<std::uint16_t> positions(count + kSlack);
    const std::uint64_t last =
        kernels_->positions(low_bytes, quotient_bytes, quotients.size(), k, count, positions.data());
    ASSERT_EQ(last, expected.back()) << "k " << k << ", " << count << " gaps";
    for (std::uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(positions[i], static_cast<std::uint16_t>(expected[i])) << i << " of " << count << ", k " << k;
    }
  }
}

TEST_P(DecodeKernelTest, PositionsOfAWholeTile) {
  Random random(23);
  Plane lows;
  Plane quotients;
  for (std::uint32_t i = 0; i < kTileElementsMax; ++i) quotients.put_zeros_and_one(0);
  const std::byte* const low_bytes = lows.finish(random);
  const std::byte* const quotient_bytes = quotients.finish(random);
  std::vector<std::uint16_t> positions(kTileElementsMax + kSlack);
  ASSERT_EQ(kernels_->positions(low_bytes, quotient_bytes, quotients.size(), 0, kTileElementsMax, positions.data()),
            kTileElementsMax - 1);
  for (std::uint32_t i = 0; i < kTileElementsMax; ++i) ASSERT_EQ(positions[i], i);
}

/// Signs and magnitudes make differences; or the planes are bad, and every set says so in the same words.
TEST_P(DecodeKernelTest, SignsAndMagnitudes) {
  Random random(24);
  for (int trial = 0; trial < 2000; ++trial) {
    const auto log2 = static_cast<unsigned>(random.below(4));
    const std::size_t width = std::size_t{1} << log2;
    const auto count = static_cast<std::uint32_t>(1 + random.below(trial % 10 == 0 ? 3000 : 150));
    const bool hostile = random.below(4) == 0;
    Plane signs;
    Plane lengths;
    Plane low;
    std::vector<std::uint64_t> expected;
    std::vector<bool> negative;
    std::string wrong;
    for (std::uint32_t i = 0; i < count; ++i) {
      negative.push_back(random.below(2) != 0);
      const std::uint64_t longest = width * 8 - (hostile ? 0 : 1);
      auto length = static_cast<unsigned>(random.below(10) != 0 ? 0 : random.below(longest + 1));
      if (length == width * 8 - 1 && !negative[i] && !hostile) --length;
      const std::uint64_t top = std::uint64_t{1} << (length % 64);
      const std::uint64_t below = length == width * 8 - 1 && !hostile ? 0 : random.next() & (top - 1);
      signs.put(negative[i] ? 1 : 0, 1);
      lengths.put_zeros_and_one(length);
      low.put(below, length);
      const std::uint64_t m = top | below;
      expected.push_back((negative[i] ? 0 - m : m) & all_ones(width));
      if (!wrong.empty()) continue;
      if (length >= width * 8) wrong = "a magnitude has more bits than the element";
      if (length == width * 8 - 1 && (!negative[i] || below != 0)) {
        wrong = "a magnitude is above half of the element's range";
      }
    }
    const std::byte* const sign_bytes = signs.finish(random);
    const std::byte* const length_bytes = lengths.finish(random);
    const std::byte* const low_bytes = low.finish(random);
    std::vector<std::byte> values(count * width + kSlack);
    kernels_->unit_values[log2](sign_bytes, count, values.data());
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t value = load_word(values.data() + i * width, width);
      ASSERT_EQ(value, negative[i] ? all_ones(width) : 1) << i << " of " << count;
    }
    const char* const found = kernels_->magnitudes[log2](length_bytes, lengths.bits(), low_bytes, values.data());
    ASSERT_EQ(found == nullptr ? "" : std::string(found), wrong) << "width " << width;
    if (!wrong.empty()) continue;
    for (std::uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(load_word(values.data() + i * width, width), expected[i]) << i << " of " << count;
    }
  }
}

std::uint64_t new_element(ValueKind kind, std::size_t width, std::uint64_t old, std::uint64_t value) {
  const std::uint64_t all = all_ones(width);
  const std::uint64_t top = all ^ (all >> 1);
  const auto map = [&](std::uint64_t x) {
    return kind == ValueKind::ulp_difference && (x & top) != 0 ? x ^ (all >> 1) : x;
  };
  return kind == ValueKind::element ? value : map((map(old) + value) & all);
}

/// All buffers end where their allocation does, so that AddressSanitizer sees any access behind.
TEST_P(DecodeKernelTest, ResolvesValuesAndTheDigest) {
  Random random(25);
  for (int trial = 0; trial < 6000; ++trial) {
    const auto log2 = static_cast<unsigned>(random.below(4));
    const std::size_t width = std::size_t{1} << log2;
    const auto kind = static_cast<ValueKind>(random.below(kValueKinds));
    std::vector<std::uint16_t> chosen;
    const std::uint64_t one_in = 1 + random.below(random.below(2) != 0 ? 3 : 60);
    const std::uint64_t elements = 1 + random.below(trial % 20 == 0 ? 5000 : 100);
    const std::uint64_t first = trial % 5 == 0 ? 0 : random.below(kTileElementsMax - elements + 1);
    for (std::uint64_t at = first; at < first + elements; ++at) {
      if (random.below(one_in) == 0) chosen.push_back(static_cast<std::uint16_t>(at));
    }
    const auto count = static_cast<std::uint32_t>(chosen.size());
    const std::unique_ptr<std::uint16_t[]> positions(new std::uint16_t[count]);
    const std::unique_ptr<std::uint64_t[]> before(new std::uint64_t[count]);
    const std::unique_ptr<std::byte[]> values(new std::byte[count * width]);
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> words;  // by index: before, after
    std::vector<std::uint64_t> expected;
    for (std::uint32_t i = 0; i < count; ++i) {
      positions[i] = chosen[i];
      const std::uint64_t index = chosen[i] * width / 8;
      const std::uint64_t fresh = random.next();
      auto& word = words.try_emplace(index, fresh, fresh).first->second;
      before[i] = word.first;
      const std::uint64_t value = random.next() & all_ones(width);
      std::memcpy(values.get() + i * width, &value, width);
      const unsigned shift = static_cast<unsigned>(chosen[i] * width % 8) * 8;
      const std::uint64_t old = (word.first >> shift) & all_ones(width);
      expected.push_back(new_element(kind, width, old, value));
      word.second ^= (old ^ expected.back()) << shift;
    }
    std::uint64_t change = 0;
    for (const auto& [index, word] : words) change += mix_word(word.second, index) - mix_word(word.first, index);
    ASSERT_EQ(kernels_->resolve[log2][static_cast<unsigned>(kind)](before.get(), positions.get(), values.get(), count),
              change)
        << "width " << width << ", kind " << static_cast<int>(kind) << ", " << count << " elements";
    for (std::uint32_t i = 0; i < count; ++i) ASSERT_EQ(load_word(values.get() + i * width, width), expected[i]);
  }
}

}  // namespace
}  // namespace deltasync::delta::test
