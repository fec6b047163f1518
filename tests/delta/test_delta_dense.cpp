// dense_ulp: every dtype and instruction set, escapes, the choice between the codecs, and merging.
#include <gmock/gmock-matchers.h>

#include <limits>

#include "base/hash.hpp"
#include "delta/dense_codec.hpp"
#include "delta/frame.hpp"
#include "delta/mix.hpp"
#include "merge_history.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;

constexpr Dtype kDtypes[] = {Dtype::f64,     Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3,
                             Dtype::f8_e5m2, Dtype::i64, Dtype::i32, Dtype::i16,  Dtype::u8};

TileShape shape_of(Dtype dtype, std::uint32_t rows, std::uint32_t cols) {
  return {rows, cols, static_cast<std::uint32_t>(dtype_bytes(dtype)), dtype_is_float(dtype), mantissa_bits(dtype)};
}

struct Changes {
  std::vector<std::uint16_t> positions;
  std::vector<std::byte> diffs;

  void add(std::uint32_t position, std::uint64_t diff, std::size_t width) {
    positions.push_back(static_cast<std::uint16_t>(position));
    const auto* const bytes = reinterpret_cast<const std::byte*>(&diff);
    diffs.insert(diffs.end(), bytes, bytes + width);
  }
  ChangedElements view() const {
    return {positions.data(), diffs.data(), static_cast<std::uint32_t>(positions.size())};
  }
};

/// About `density` of the elements, by differences of up to about `bits` bits and a few of any size.
Changes change(const TileShape& shape, double density, unsigned bits, Random& random) {
  Changes out;
  const std::uint64_t all = std::numeric_limits<std::uint64_t>::max() >> (64 - shape.element_bytes * 8);
  for (std::uint32_t i = 0; i < shape.elements(); ++i) {
    if (i != 0 && random.uniform() >= density) continue;
    std::uint64_t diff = random.next() >> (64 - bits);
    const std::uint64_t kind = random.below(300);
    if (kind == 0) diff = random.next();
    if (kind == 1) diff = (all >> 1) + 1;  // −2^(w−1)
    if (random.below(2) == 0) diff = 0 - diff;
    if ((diff & all) == 0) diff = 1;
    out.add(i, diff, shape.element_bytes);
  }
  return out;
}

class Dense : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = find_kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this CPU or build has no " << GetParam();
  }
  const Kernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Isa, Dense, ::testing::Values("scalar", "avx2", "avx512", "neon"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Dense, EveryDtypeShapeAndSizeOfChangeIsExact) {
  Random random(51);
  std::vector<std::byte> numbers;
  std::vector<std::byte> scalar_numbers;
  const std::pair<std::uint32_t, std::uint32_t> shapes[] = {{1, 1}, {1, 9}, {7, 30}, {64, 41}, {256, 256}};
  for (const Dtype dtype : kDtypes) {
    for (const auto& [rows, cols] : shapes) {
      const TileShape shape = shape_of(dtype, rows, cols);
      const unsigned width = shape.element_bytes * 8;
      for (unsigned bits = 1; bits <= width; bits += width > 16 && rows > 7 ? 7 : 3) {
        for (const double density : {0.3, 0.998, 1.0}) {
          const Changes changes = change(shape, density, bits, random);
          const DenseChoice choice = measure_dense(kernels_->dense, shape, changes.view(), numbers);
          TileRecord record;
          std::vector<std::byte> payload = {std::byte{0x77}};  // what is there already stays
          append_dense(kernels_->dense, shape, choice, numbers, changes.view().count, record, payload);
          ASSERT_EQ(payload[0], std::byte{0x77});
          record.payload = ByteSpan(payload).subspan(1);
          ASSERT_EQ(record.payload.size(), dense_plane_sizes(shape, choice).total());
          TileRecord scalar_record;
          std::vector<std::byte> scalar_payload;
          append_dense(scalar_kernels().dense, shape,
                       measure_dense(scalar_kernels().dense, shape, changes.view(), scalar_numbers), scalar_numbers,
                       changes.view().count, scalar_record, scalar_payload);
          ASSERT_TRUE(std::equal(scalar_payload.begin(), scalar_payload.end(), payload.begin() + 1, payload.end()));
          ASSERT_EQ(record.rice_k, scalar_record.rice_k);
          const auto decoded = decode_dense(*kernels_, shape, record);
          if (record.payload.size() > shape.raw_bytes()) {
            ASSERT_FALSE(decoded.ok());
            continue;
          }
          ASSERT_TRUE(decoded.ok()) << to_string(dtype) << ' ' << bits << ": " << decoded.error().to_string();
          ASSERT_EQ(decoded->count, changes.positions.size());
          ASSERT_TRUE(std::equal(changes.positions.begin(), changes.positions.end(), decoded->positions));
          ASSERT_EQ(std::memcmp(decoded->values, changes.diffs.data(), changes.diffs.size()), 0);
        }
      }
    }
  }
}

/// So many alike that a byte of a vector could not count them.
TEST_P(Dense, LengthsOfALargestTileOfOneLength) {
  for (unsigned log2 = 0; log2 < 4; ++log2) {
    const unsigned width = 8U << log2;
    const std::vector<std::byte> numbers(std::size_t{kTileElementsMax} << log2, std::byte{0xFF});
    std::vector<std::uint32_t> counts(width + 1, 77);
    kernels_->dense.lengths[log2](numbers.data(), kTileElementsMax, counts.data());
    std::vector<std::uint32_t> expected(width + 1);
    expected[width] = kTileElementsMax;
    ASSERT_EQ(counts, expected) << width << " bits";
  }
}

/// The parameter that is chosen from the numbers' lengths is about as good as the best.
TEST_P(Dense, TheParameterIsNearTheBest) {
  Random random(52);
  std::vector<std::byte> numbers;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64}) {
    const TileShape shape = shape_of(dtype, 64, 64);
    for (unsigned bits = 1; bits < shape.element_bytes * 8U - 2; ++bits) {
      const Changes changes = change(shape, 0.99, bits, random);
      const DenseChoice choice = measure_dense(kernels_->dense, shape, changes.view(), numbers);
      std::size_t best = std::numeric_limits<std::size_t>::max();
      for (unsigned k = 0; k < shape.element_bytes * 8U; ++k) {
        const DenseSums sums = kernels_->dense.sums[shape.width_log2()](numbers.data(), shape.elements(), k);
        best = std::min(best, dense_plane_sizes(shape, {k, sums}).total());
      }
      EXPECT_LE(static_cast<double>(dense_plane_sizes(shape, choice).total()), static_cast<double>(best) * 1.03 + 8)
          << to_string(dtype) << ' ' << bits;
    }
  }
}

/// Hashes of what was made before: the encoder's choices are free, but to change them is a decision.
TEST(DensePayloads, AreWhatTheyWere) {
  Random random(53);
  std::vector<std::byte> numbers;
  std::vector<std::uint64_t> hashes;
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::u8}) {
    const TileShape shape = shape_of(dtype, 33, 41);
    std::vector<std::byte> all;
    TileRecord record;
    for (unsigned bits = 1; bits <= shape.element_bytes * 8U; ++bits) {
      for (const double density : {0.3, 0.9, 1.0}) {
        const Changes changes = change(shape, density, bits, random);
        const DenseKernels& kernels = scalar_kernels().dense;
        append_dense(kernels, shape, measure_dense(kernels, shape, changes.view(), numbers), numbers,
                     changes.view().count, record, all);
        all.push_back(static_cast<std::byte>(record.rice_k));
      }
    }
    hashes.push_back(xxh3_64(all));
  }
  EXPECT_EQ(hashes, (std::vector<std::uint64_t>{13348021898304862332U, 7606328604698063300U, 7843841271297662963U,
                                                15299101815253873872U}));
}

/// Half of a model of several dtypes, moved by up to `ulps`.
std::vector<std::byte> step_densely(std::vector<std::byte> half, const Layout& layout, double density,
                                    std::uint64_t ulps, std::uint64_t seed) {
  Random random(seed);
  for (const Tensor& tensor : layout.tensors()) {
    const std::size_t width = tensor.element_bytes;
    for (std::uint64_t at = tensor.offset; at < tensor.offset + tensor.bytes; at += width) {
      if (random.uniform() >= density) continue;
      std::uint64_t bits = 0;
      std::memcpy(&bits, &half[at], width);
      bits += random.below(2 * ulps + 1) - ulps;
      std::memcpy(&half[at], &bits, width);
    }
  }
  return half;
}

std::vector<TensorSpec> wide_specs() {
  return {{"f32", Dtype::f32, {130, 300}, {70}, {101}},
          {"bf16", Dtype::bf16, {130, 300}, {}, {}},
          {"f64", Dtype::f64, {40, 41}, {}, {}},
          {"i32", Dtype::i32, {900}, {}, {}}};
}

TEST(DenseTiles, AreChosenWhereTheyAreSmallerAndDecodeByEveryPath) {
  const TestModel model = make_model(7, wide_specs());
  const std::vector<std::byte> after = step_densely(model.half, *model.layout, 0.998, 60, 1);
  const Delta delta = encode_between(*model.layout, model.half, after);
  EXPECT_EQ(delta.stats[static_cast<unsigned>(Codec::dense_ulp)].tiles, model.layout->tile_count());
  expect_round_trip(*model.layout, model.half, after, delta);
  for (const Kernels* kernels : all_kernels()) {
    EXPECT_EQ(to_container(encode_between(*model.layout, model.half, after, ValueForm::ulp, *kernels)),
              to_container(delta))
        << kernels->name;
  }
  const auto read = from_container(to_container(delta), *model.layout);
  ASSERT_TRUE(read.ok()) << read.error().to_string();
  // The absolute form never has differences.
  const Delta absolute = encode_between(*model.layout, model.half, after, ValueForm::absolute);
  EXPECT_EQ(absolute.stats[static_cast<unsigned>(Codec::dense_ulp)].tiles, 0U);
  // Sparse steps stay what they were.
  const Delta sparse = encode_between(*model.layout, model.half, step_densely(model.half, *model.layout, 0.05, 3, 2));
  EXPECT_EQ(sparse.stats[static_cast<unsigned>(Codec::dense_ulp)].tiles, 0U);
  // Compacting leaves them alone, and cutting keeps them.
  ThreadPool pool(1, "test");
  const auto compacted = compact(*model.layout, delta, model.half, pool);
  ASSERT_TRUE(compacted.ok()) << compacted.error().to_string();
  EXPECT_EQ(to_container(*compacted), to_container(delta));
  for (const Frame& frame : delta.frames) {
    const Batch wanted[] = {{frame.last_tile, frame.last_tile + 1}};
    const Frame cut = cut_frame(frame, wanted);
    EXPECT_EQ(cut_size(frame, wanted).bytes, cut.bytes.size());
    EXPECT_EQ(records_of(*model.layout, cut.bytes).at(0).payload.size(),
              records_of(*model.layout, frame.bytes).back().payload.size());
  }
}

TEST(DenseTiles, AWrongBaseIsFound) {
  const TestModel model = make_model(8, wide_specs());
  const std::vector<std::byte> after = step_densely(model.half, *model.layout, 1, 60, 3);
  const Delta delta = encode_between(*model.layout, model.half, after);
  const auto digests = digests_of(*model.layout, model.half);
  std::vector<std::byte> wrong = model.half;
  for (const TileRecord& record : records_of(*model.layout, delta.frames.at(0).bytes)) {
    std::byte* const first = tile_in(*model.layout, wrong, record.tile);
    *first ^= std::byte{1};
    const auto digest =
        apply_tile(*model.layout, record, first, stride_of(*model.layout, record.tile), digests[record.tile]);
    ASSERT_FALSE(digest.ok());
    EXPECT_THAT(digest.error().message(), HasSubstr("state digest"));
    *first ^= std::byte{1};
    ASSERT_EQ(wrong, model.half);
  }
}

/// Chains whose records are differences only, sparse and dense ones mixed, are the direct delta.
TEST(DenseTiles, MergedIsDirect) {
  const TestModel model = make_model(9, wide_specs());
  const std::pair<double, std::uint64_t> kinds[] = {{0.998, 60}, {0.01, 1}, {0.5, 1}, {1.0, 5}};
  for (std::size_t first = 0; first < std::size(kinds); ++first) {
    History history(model);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto& [density, ulps] = kinds[(first + i) % std::size(kinds)];
      history.push(step_densely(history.halves.back(), *model.layout, density, ulps, 10 * first + i));
    }
    std::uint64_t others = 0;
    const Delta direct = history.direct();
    for (const Delta& delta : history.deltas) {
      others += delta.stats[static_cast<unsigned>(Codec::raw)].tiles +
                delta.stats[static_cast<unsigned>(Codec::rice_absolute)].tiles;
    }
    ASSERT_EQ(others, 0U) << "the case is not one of differences only";
    EXPECT_GT(direct.stats[static_cast<unsigned>(Codec::dense_ulp)].tiles, 0U);
    const auto merged = merge_history(history);
    ASSERT_TRUE(merged.ok()) << merged.error().to_string();
    ASSERT_TRUE(merged->has_value());
    EXPECT_EQ(to_container(**merged), to_container(direct));
    expect_round_trip(*model.layout, history.halves.front(), history.halves.back(), **merged);
  }
}

}  // namespace
}  // namespace deltasync::delta::test
