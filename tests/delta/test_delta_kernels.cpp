// Every instruction set against the scalar truth: random contents, widths, densities, alignments and tails.
#include <memory>

#include "delta/mix.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

class KernelTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = find_kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this CPU or build has no " << GetParam();
  }
  const Kernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Isa, KernelTest, ::testing::Values("scalar", "avx2", "avx512", "neon"),
                         [](const auto& param) { return std::string(param.param); });

/// Exactly `size` bytes at an address that is `skew` bytes from an aligned one and ends at the end of its allocation,
/// so that AddressSanitizer sees any read behind it.
class Bytes {
 public:
  Bytes(std::size_t size, std::size_t skew) : memory_(new std::byte[size + skew]), skew_(skew) {}
  std::byte* data() { return memory_.get() + skew_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t skew_;
};

void fill(std::byte* to, std::size_t size, Random& random) {
  for (std::size_t i = 0; i < size; ++i) to[i] = static_cast<std::byte>(random.next() >> 56);
}

struct Scanned {
  std::vector<std::uint16_t> positions = std::vector<std::uint16_t>(kTileElementsMax + kSlack);
  std::vector<std::byte> diffs = std::vector<std::byte>((kTileElementsMax + kSlack) * 8);
  ScanOutput out;
  Scanned() {
    out.positions = positions.data();
    out.diffs = diffs.data();
  }
};

/// What a scan must find, element by element, from the definitions alone.
void expect_definition(const std::byte* a, const std::byte* b, std::uint32_t elements, std::size_t width, bool is_float,
                       std::uint32_t first_position, const ScanOutput& out) {
  const unsigned bits = static_cast<unsigned>(width) * 8;
  const std::uint64_t all = bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
  const std::uint64_t top = std::uint64_t{1} << (bits - 1);
  const auto map = [&](std::uint64_t x) { return is_float && (x & top) != 0 ? x ^ (top - 1) : x; };
  std::uint32_t found = 0;
  for (std::uint32_t i = 0; i < elements; ++i) {
    const std::uint64_t x = load_word(a + i * width, width);
    const std::uint64_t y = load_word(b + i * width, width);
    if (x == y) continue;
    ASSERT_LT(found, out.count);
    ASSERT_EQ(out.positions[found], first_position + i);
    ASSERT_EQ(load_word(out.diffs + found * width, width), (map(y) - map(x)) & all);
    ++found;
  }
  ASSERT_EQ(found, out.count);
}

TEST_P(KernelTest, ScanFindsWhatTheDefinitionSays) {
  Random random(11);
  Scanned scanned;
  for (int trial = 0; trial < 3000; ++trial) {
    const unsigned log2 = static_cast<unsigned>(random.below(4));
    const std::size_t width = std::size_t{1} << log2;
    const bool is_float = random.below(2) != 0;
    const auto elements = static_cast<std::uint32_t>(random.below(trial % 10 == 0 ? 5000 : 200));
    const std::size_t size = elements * width;
    Bytes a(size, random.below(64));
    Bytes b(size, random.below(64));
    fill(a.data(), size, random);
    std::memcpy(b.data(), a.data(), size);
    const std::uint64_t one_in = 1 + random.below(random.below(2) != 0 ? 4 : 100);
    for (std::uint32_t i = 0; i < elements; ++i) {
      if (random.below(one_in) == 0) b.data()[i * width + random.below(width)] ^= static_cast<std::byte>(random.next());
    }
    const auto first_position = static_cast<std::uint32_t>(random.below(65536 - elements));
    const std::uint64_t first_word = random.below(8192);
    scanned.out.count = 0;
    scanned.out.digest_change = 5;
    const unsigned form = kernels_->scans[1].of[0][0] != nullptr ? trial % 2 : 0;
    kernels_->scans[form].of[log2][is_float](a.data(), b.data(), elements, first_position, first_word, scanned.out);
    ASSERT_NO_FATAL_FAILURE(
        expect_definition(a.data(), b.data(), elements, width, is_float, first_position, scanned.out))
        << "trial " << trial;
    std::uint64_t change = 5;
    for (std::size_t at = 0; at < size; at += 8) {
      const std::uint64_t word = first_word + at / 8;
      change += mix_word(load_word(b.data() + at, size - at), word);
      change -= mix_word(load_word(a.data() + at, size - at), word);
    }
    ASSERT_EQ(scanned.out.digest_change, change) << "trial " << trial;
  }
}

TEST_P(KernelTest, ScanOfAWholeTileOfChanges) {
  Random random(12);
  for (unsigned log2 = 0; log2 < 4; ++log2) {
    const std::size_t size = std::size_t{kTileElementsMax} << log2;
    Bytes a(size, 0);
    Bytes b(size, 0);
    fill(a.data(), size, random);
    for (std::size_t i = 0; i < size; ++i) b.data()[i] = ~a.data()[i];
    for (const ScanTable& scan : kernels_->scans) {
      if (scan.of[log2][1] == nullptr) continue;
      Scanned scanned;
      scan.of[log2][1](a.data(), b.data(), kTileElementsMax, 0, 0, scanned.out);
      ASSERT_NO_FATAL_FAILURE(
          expect_definition(a.data(), b.data(), kTileElementsMax, std::size_t{1} << log2, true, 0, scanned.out));
    }
  }
}

TEST_P(KernelTest, DigestRunIsTheSumOfItsWords) {
  Random random(13);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::size_t size = random.below(trial % 10 == 0 ? 3000 : 200);
    Bytes bytes(size, random.below(64));
    fill(bytes.data(), size, random);
    const std::uint64_t first = random.below(1 << 20);
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < size; at += 8)
      sum += mix_word(load_word(bytes.data() + at, size - at), first + at / 8);
    ASSERT_EQ(kernels_->digest_run(bytes.data(), size, first), sum) << size << " bytes";
  }
}

TEST_P(KernelTest, CopyDigest) {
  Random random(15);
  const std::size_t sizes[] = {0, 1, 8, 63, 64, 4095, 4096, 4160, 5003, 16384, 16384 + 64, 3 * 16384 + 4096 + 72};
  for (const std::size_t size : sizes) {
    for (const std::size_t skew : {0U, 1U, 8U, 40U, 63U}) {
      for (const Kernels::CopyDigestFn copy_digest : kernels_->copy_digests) {
        if (copy_digest == nullptr) continue;
        Bytes from(size, skew % 3);
        Bytes to(size, skew);
        for (std::size_t i = 0; i < size; ++i) from.data()[i] = static_cast<std::byte>(random.next());
        const std::uint64_t first = random.below(1 << 20);
        const std::uint64_t digest = copy_digest(to.data(), from.data(), size, first);
        ASSERT_EQ(digest, scalar_kernels().digest_run(from.data(), size, first)) << size << " bytes, skew " << skew;
        ASSERT_TRUE(std::equal(to.data(), to.data() + size, from.data())) << size << " bytes, skew " << skew;
      }
    }
  }
}

TEST_P(KernelTest, DigestPairs) {
  Random random(14);
  for (std::uint32_t count = 0; count < 200; ++count) {
    std::vector<std::uint64_t> before(count);
    std::vector<std::uint64_t> after(count);
    std::vector<std::uint32_t> words(count);
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      before[i] = random.next();
      after[i] = random.next();
      words[i] = static_cast<std::uint32_t>(random.below(65536));
      sum += mix_word(after[i], words[i]) - mix_word(before[i], words[i]);
    }
    ASSERT_EQ(kernels_->digest_pairs(before.data(), after.data(), words.data(), count), sum) << count;
  }
}

/// Ascending positions with about one in `one_in` of the tile.
std::vector<std::uint16_t> some_positions(Random& random, std::uint64_t one_in) {
  std::vector<std::uint16_t> positions;
  for (std::uint64_t at = random.below(one_in); at < kTileElementsMax; at += 1 + random.below(2 * one_in - 1)) {
    positions.push_back(static_cast<std::uint16_t>(at));
  }
  if (positions.empty()) positions.push_back(static_cast<std::uint16_t>(random.below(65536)));
  return positions;
}

TEST_P(KernelTest, GapsTheirSumsAndTheirLowBits) {
  Random random(15);
  for (int trial = 0; trial < 300; ++trial) {
    const auto positions = some_positions(random, 1 + random.below(trial % 3 == 0 ? 40000 : 200));
    const auto count = static_cast<std::uint32_t>(positions.size());
    std::vector<std::uint16_t> gaps(count + kSlack, 0xABCD);
    kernels_->gaps(positions.data(), count, gaps.data());
    for (std::uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(gaps[i], i == 0 ? positions[0] : positions[i] - positions[i - 1] - 1);
    }
    for (unsigned k = 0; k <= kRiceKMax; ++k) {
      std::uint64_t sum = 0;
      for (std::uint32_t i = 0; i < count; ++i) sum += static_cast<unsigned>(gaps[i] >> k);
      ASSERT_EQ(kernels_->quotient_sum(gaps.data(), count, k), sum) << "k " << k;
      const std::size_t size = (std::size_t{count} * k + 7) / 8;
      std::vector<std::byte> plane(size + kSlack, std::byte{0});
      kernels_->pack_low(gaps.data(), count, k, plane.data());
      for (std::uint32_t i = 0; i < count; ++i) {
        for (unsigned bit = 0; bit < k; ++bit) {
          const std::size_t at = std::size_t{i} * k + bit;
          ASSERT_EQ((static_cast<unsigned>(plane[at / 8]) >> (at % 8)) & 1, (static_cast<unsigned>(gaps[i]) >> bit) & 1)
              << "gap " << i << " of " << count << ", k " << k;
        }
      }
      for (std::size_t at = std::size_t{count} * k; at < size * 8; ++at) {
        ASSERT_EQ((static_cast<unsigned>(plane[at / 8]) >> (at % 8)) & 1, 0U) << "padding, k " << k;
      }
      std::vector<std::uint16_t> lows(count + kSlack);
      kernels_->unpack_low(plane.data(), count, k, lows.data());
      for (std::uint32_t i = 0; i < count; ++i) ASSERT_EQ(lows[i], gaps[i] & ((1U << k) - 1)) << "k " << k;
    }
  }
}

TEST_P(KernelTest, SignsAndExceptions) {
  Random random(16);
  for (int trial = 0; trial < 1000; ++trial) {
    const unsigned log2 = static_cast<unsigned>(random.below(4));
    const std::size_t width = std::size_t{1} << log2;
    const std::uint64_t top = std::uint64_t{1} << (width * 8 - 1);
    const auto count = static_cast<std::uint32_t>(1 + random.below(trial % 10 == 0 ? 3000 : 150));
    std::vector<std::byte> diffs(count * width + kSlack);
    std::vector<std::uint16_t> expected;
    std::uint64_t gamma_bits = 0;
    std::vector<bool> negative;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t m = random.below(10) != 0 ? 1 : random.next() >> (64 - 1 - random.below(width * 8));
      m = m == 0 || m > top ? top : m;
      const bool minus = m == top || random.below(2) != 0;
      const std::uint64_t d = minus ? 0 - m : m;
      std::memcpy(diffs.data() + i * width, &d, width);
      negative.push_back(minus);
      if (m == 1) continue;
      expected.push_back(static_cast<std::uint16_t>(i));
      gamma_bits += 63U - static_cast<unsigned>(__builtin_clzll(m));
    }
    std::vector<std::byte> signs((count + 7) / 8 + kSlack);
    std::vector<std::uint16_t> exceptions(count + kSlack);
    const SignSplit split = kernels_->split_signs[log2](diffs.data(), count, signs.data(), exceptions.data());
    ASSERT_EQ(split.exceptions, expected.size());
    ASSERT_EQ(split.gamma_bits, gamma_bits);
    for (std::size_t e = 0; e < expected.size(); ++e) ASSERT_EQ(exceptions[e], expected[e]);
    for (std::uint32_t i = 0; i < (count + 7) / 8 * 8; ++i) {
      const bool bit = ((static_cast<unsigned>(signs[i / 8]) >> (i % 8)) & 1) != 0;
      ASSERT_EQ(bit, i < count && negative[i]) << "sign " << i << " of " << count << ", width " << width;
    }
  }
}

/// A plane as its definition builds it, bit by bit.
class Plane {
 public:
  void put(std::uint64_t value, std::uint64_t bits) {
    for (std::uint64_t b = 0; b < bits; ++b) bits_.push_back(b < 64 && (value >> b & 1) != 0);
  }
  void put_unary(std::uint64_t zeros) {
    put(0, zeros);
    put(1, 1);
  }
  std::uint64_t bits() const { return bits_.size(); }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> out((bits_.size() + 7) / 8);
    for (std::size_t b = 0; b < bits_.size(); ++b) out[b / 8] |= static_cast<std::byte>(bits_[b] ? 1U << (b % 8) : 0U);
    return out;
  }

 private:
  std::vector<bool> bits_;
};

TEST_P(KernelTest, UnaryPlanes) {
  Random random(18);
  for (int trial = 0; trial < 600; ++trial) {
    // From runs that are all short to some that are longer than any vector has bits.
    const auto count = static_cast<std::uint32_t>(1 + random.below(trial % 5 == 0 ? 3000 : 100));
    const auto k = static_cast<unsigned>(random.below(kRiceKMax + 1));
    const std::uint64_t usual = 1 + random.below(12);
    const std::uint64_t long_one_in = random.below(2) != 0 ? 1u << 20 : 1 + random.below(60);
    const std::uint64_t longest = 1 + random.below(65535U >> k);
    std::vector<std::uint16_t> gaps(count + kSlack);
    Plane plane;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t q = std::min(random.below(long_one_in) == 0 ? longest : random.below(usual), longest);
      gaps[i] = static_cast<std::uint16_t>(q << k | random.below(std::uint64_t{1} << k));
      plane.put_unary(q);
    }
    std::vector<std::byte> out((plane.bits() + 7) / 8 + kSlack, std::byte{0xA5});
    kernels_->pack_unary(gaps.data(), count, k, out.data());
    out.resize((plane.bits() + 7) / 8);
    ASSERT_TRUE(out == plane.bytes()) << "trial " << trial;
  }
}

// The bytes of a delta are a function of the two halves alone.
TEST_P(KernelTest, EncodesTheSameBytesWithAnyNumberOfThreads) {
  auto specs = sample_specs();
  TensorSpec big;  // several batches, and bands of several panels
  big.name = "big";
  big.dtype = Dtype::bf16;
  big.shape = {4096, 2048};
  big.col_cuts = {500, 1024, 1025};
  specs.push_back(big);
  const TestModel model = make_model(17, specs);
  for (const double density : {0.003, 0.3}) {
    std::vector<std::byte> after = model.half;
    mutate(after, *model.layout, density, 17);
    const auto truth =
        to_container(encode_between(*model.layout, model.half, after, ValueForm::ulp, scalar_kernels(), 1));
    for (const unsigned threads : {1U, 2U, 4U}) {
      const auto bytes =
          to_container(encode_between(*model.layout, model.half, after, ValueForm::ulp, *kernels_, threads));
      ASSERT_TRUE(bytes == truth) << threads << " threads";
    }
  }
}

TEST(Dispatch, NamesWhatItUses) {
  const std::string name = isa_name();
  EXPECT_NE(find_kernels(name.c_str()), nullptr);
  EXPECT_EQ(find_kernels("mmx"), nullptr);
}

TEST(DispatchDeathTest, AnUnknownForcedIsaIsAnErrorAtStart) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // The choice is made once a process, so the death test's child, which starts again, must make it for the first time.
  ::setenv("DELTASYNC_ISA", "mmx", 1);
  EXPECT_EXIT(isa_name(), ::testing::ExitedWithCode(1), "DELTASYNC_ISA=mmx is unknown or not available");
  ::unsetenv("DELTASYNC_ISA");
}

}  // namespace
}  // namespace deltasync::delta::test
