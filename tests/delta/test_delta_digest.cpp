// The state digest: its definition, and that it catches what it must. Its collisions are those of chance, 2^-64.
#include "delta/mix.hpp"
#include "delta_test_util.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta::test {
namespace {

std::uint64_t digest(const std::vector<std::uint16_t>& elements, std::uint64_t rows) {
  const std::size_t row_bytes = elements.size() / rows * 2;
  return tile_digest(reinterpret_cast<const std::byte*>(elements.data()), row_bytes, rows, row_bytes);
}

TEST(StateDigest, IsTheSumOfMixedWordsOfPaddedRows) {
  Random random(1);
  for (const std::uint64_t row_bytes : {1U, 2U, 6U, 8U, 14U, 64U, 200U, 514U}) {
    const std::size_t stride = row_bytes + 5;
    std::vector<std::byte> memory(20 * stride);
    for (auto& b : memory) b = static_cast<std::byte>(random.next());
    std::uint64_t sum = 0;
    std::uint64_t index = 0;
    for (std::size_t r = 0; r < 20; ++r) {
      for (std::size_t at = 0; at < row_bytes; at += 8) {
        std::uint64_t x = load_word(&memory[r * stride + at], row_bytes - at) + ++index * 0x9E3779B97F4A7C15;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
        sum += x ^ (x >> 31);
      }
    }
    EXPECT_EQ(tile_digest(memory.data(), stride, 20, row_bytes), sum) << row_bytes;
  }
}

TEST(StateDigest, OfACopyIsThatOfTheCopiedRows) {
  Random random(6);
  for (const std::uint64_t row_bytes : {6U, 64U, 514U, 8192U}) {
    const std::size_t stride = row_bytes + 6;
    std::vector<std::byte> from(20 * stride);
    for (auto& b : from) b = static_cast<std::byte>(random.next());
    for (const std::size_t to_stride : {std::size_t{row_bytes}, stride + 3}) {
      std::vector<std::byte> to(20 * to_stride);
      const std::uint64_t expected = tile_digest(from.data(), stride, 20, row_bytes);
      EXPECT_EQ(copy_tile_digest(to.data(), to_stride, from.data(), stride, 20, row_bytes), expected) << row_bytes;
      EXPECT_EQ(tile_digest(to.data(), to_stride, 20, row_bytes), expected) << row_bytes;
    }
  }
}

// Fixed numbers: a change of the definition would make old and new builds disagree over the wire.
TEST(StateDigest, KnownValues) {
  std::vector<std::uint16_t> ramp(65536);
  for (std::size_t i = 0; i < ramp.size(); ++i) ramp[i] = static_cast<std::uint16_t>(i);
  EXPECT_EQ(mix(0), 0U);
  EXPECT_EQ(mix(0x9E3779B97F4A7C15), 0xE220A8397B1DCDAFU);  // the first output of SplitMix64 seeded with 0
  EXPECT_EQ(digest(std::vector<std::uint16_t>(4), 1), 0xE220A8397B1DCDAFU);
  EXPECT_EQ(digest(ramp, 256), 0x17ADA262799C1C7AU);
  EXPECT_EQ(digest(ramp, 256), digest(ramp, 16)) << "rows of whole words are one run";
}

TEST(StateDigest, EveryChangeInsideOneWordIsCaught) {
  Random random(2);
  for (const std::uint64_t index : {0U, 1U, 7U, 8U, 1000U, 16383U}) {
    const std::uint64_t word = random.next();
    const std::uint64_t before = mix_word(word, index);
    for (unsigned a = 0; a < 64; ++a) {
      for (unsigned b = a; b < 64; ++b) {
        const std::uint64_t flipped = word ^ (std::uint64_t{1} << a) ^ (a == b ? 0 : std::uint64_t{1} << b);
        ASSERT_NE(mix_word(flipped, index), before) << "bits " << a << " and " << b << " of word " << index;
      }
    }
  }
  // A bijection has no two preimages: undo each step of it.
  for (int trial = 0; trial < 1000; ++trial) {
    const std::uint64_t x = random.next();
    const auto unshift = [](std::uint64_t v, unsigned s) {
      for (std::uint64_t shifted = v >> s; shifted != 0; shifted >>= s) v ^= shifted;
      return v;
    };
    const auto inverse = [](std::uint64_t odd) {
      std::uint64_t inv = odd;
      for (int i = 0; i < 6; ++i) inv *= 2 - odd * inv;
      return inv;
    };
    std::uint64_t y = unshift(mix(x), 31) * inverse(kMixSecond);
    y = unshift(y, 27) * inverse(kMixFirst);
    ASSERT_EQ(unshift(y, 30), x);
  }
}

/// bf16 weights, as a layer has them.
std::vector<std::uint16_t> weights(Random& random, std::size_t count) {
  std::vector<std::uint16_t> out(count);
  for (auto& x : out) x = static_cast<std::uint16_t>((random.next() & 0x8000) | (0x3C00 + random.below(0x180)));
  return out;
}

// Changes that cancel in weak sums: one weight up and another down by an ulp, two words swapped, a value moved, rows
// shifted. None may collide in this many trials (expected by chance: 10^-14).
TEST(StateDigest, StructuredPairsSwapsAndShiftsAreCaught) {
  Random random(3);
  constexpr std::size_t kCount = 512;
  constexpr std::uint64_t kRows = 8;
  std::uint64_t trials = 0;
  for (int model = 0; model < 200; ++model) {
    auto w = weights(random, kCount);
    const std::uint64_t before = digest(w, kRows);
    for (int trial = 0; trial < 200; ++trial) {
      const std::size_t i = random.below(kCount);
      const std::size_t j = random.below(kCount);
      const std::size_t a = i / 4 * 4;
      const std::size_t b = j / 4 * 4;
      if (a == b) continue;
      const auto changed = [&](const char* what) {
        ++trials;
        ASSERT_NE(digest(w, kRows), before) << what << " at " << i << " and " << j;
      };
      ++w[i], --w[j];
      changed("opposite ulps");
      --w[i], ++w[j];
      w[i] ^= 0x8000, w[j] ^= 0x8000;
      changed("two signs");
      w[i] ^= 0x8000, w[j] ^= 0x8000;
      if (!std::equal(w.begin() + static_cast<std::ptrdiff_t>(a), w.begin() + static_cast<std::ptrdiff_t>(a + 4),
                      w.begin() + static_cast<std::ptrdiff_t>(b))) {
        const auto swap = [&] { std::swap_ranges(w.data() + a, w.data() + a + 4, w.data() + b); };
        swap();
        changed("swapped words");
        swap();
      }
    }
    for (std::size_t row = 1; row < kRows; ++row) {
      auto shifted = w;
      std::rotate(shifted.begin(), shifted.begin() + static_cast<std::ptrdiff_t>(row * kCount / kRows), shifted.end());
      ++trials;
      ASSERT_NE(digest(shifted, kRows), before) << "rows shifted by " << row;
    }
  }
  EXPECT_GE(trials, 100000U);
}

// The same words in another tile position, or zeros in place of padding, are another state only where bytes differ.
TEST(StateDigest, HalfDigestsAreTileDigests) {
  auto specs = sample_specs();
  TensorSpec cut;
  cut.name = "cut";
  cut.dtype = Dtype::f16;
  cut.shape = {300, 777};
  cut.row_cuts = {100, 101};
  cut.col_cuts = {5, 300};
  specs.push_back(cut);
  const TestModel model = make_model(4, specs);
  std::vector<std::byte> half = model.half;
  const auto all = digests_of(*model.layout, half);
  for (std::uint64_t index = 0; index < model.layout->tile_count(); ++index) {
    const Tile tile = tile_of(*model.layout, index);
    const std::size_t width = model.layout->tensors()[tile.tensor].element_bytes;
    ASSERT_EQ(all[index], tile_digest(tile_in(*model.layout, half, index), stride_of(*model.layout, index),
                                      tile.rect.rows, tile.rect.cols * width));
  }
}

TEST(StateDigest, RootDependsOnEveryDigestAndTheirOrder) {
  std::vector<std::uint64_t> digests = {1, 2, 3};
  const Digest128 root = root_digest(digests);
  EXPECT_EQ(root_digest(digests), root);
  std::swap(digests[0], digests[2]);
  EXPECT_NE(root_digest(digests), root);
  digests = {1, 2, 3, 0};
  EXPECT_NE(root_digest(digests), root);
}

}  // namespace
}  // namespace deltasync::delta::test
