// rice_class: every float dtype, awkward shapes and strides, all densities, every path; and that compacting never makes
// anything larger.
#include <gmock/gmock-matchers.h>

#include <limits>

#include "delta/class_codec.hpp"
#include "delta/mix.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

constexpr Dtype kFloats[] = {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2};

/// A tile in a larger memory whose other bytes must stay as they are.
struct TileMemory {
  TileShape shape;
  std::size_t row_stride = 0;
  std::vector<std::byte> bytes;

  TileMemory(Dtype dtype, std::uint32_t rows, std::uint32_t cols, std::size_t gap)
      : shape{rows, cols, static_cast<std::uint32_t>(dtype_bytes(dtype)), dtype_is_float(dtype), mantissa_bits(dtype)},
        row_stride(shape.row_bytes() + gap),
        bytes(rows * row_stride, std::byte{0xA5}) {}
  std::uint64_t get(std::uint32_t position) const {
    std::uint64_t element = 0;
    std::memcpy(&element, &bytes[offset(position)], shape.element_bytes);
    return element;
  }
  void put(std::uint32_t position, std::uint64_t element) {
    std::memcpy(&bytes[offset(position)], &element, shape.element_bytes);
  }

 private:
  std::size_t offset(std::uint32_t position) const {
    return position / shape.cols * row_stride + std::size_t{position} % shape.cols * shape.element_bytes;
  }
};

enum class Base : std::uint8_t { weights, arbitrary, special, equal };

/// Elements as a model has them, any patterns (NaN payloads included), the patterns at the ends of the scales
/// (zeros of both signs, denormals, infinities), or all the same.
void fill(TileMemory& tile, Base base, Random& random) {
  const unsigned width = tile.shape.element_bytes * 8;
  const std::uint64_t top = std::uint64_t{1} << (width - 1);
  const std::uint64_t one = std::uint64_t{1} << tile.shape.mantissa_bits;
  const std::uint64_t special[] = {0, top, 1, top + 1, one - 1, one, top - one, top - one + 1, top - 1, 2 * top - 1};
  for (std::uint32_t i = 0; i < tile.shape.elements(); ++i) {
    switch (base) {
      case Base::weights: {
        const auto below = static_cast<std::uint64_t>(std::countr_zero(random.next() | 64));
        tile.put(i, random.below(2) * top + (top / 2 / one - below) * one + random.below(one));
        break;
      }
      case Base::arbitrary: tile.put(i, random.next()); break;
      case Base::special: tile.put(i, special[random.below(std::size(special))]); break;
      case Base::equal: tile.put(i, one + 1);
    }
  }
}

struct Changes {
  std::vector<std::uint16_t> positions;
  std::vector<std::byte> diffs;

  ChangedElements view() const {
    return {positions.data(), diffs.data(), static_cast<std::uint32_t>(positions.size())};
  }
};

/// About `density` of the elements, at least one, by ±1, a few, or any number of ulp (−2^(w−1) included).
Changes change(const TileShape& shape, double density, Random& random) {
  Changes out;
  const std::uint32_t certain = static_cast<std::uint32_t>(random.below(shape.elements()));
  const std::uint64_t top = std::uint64_t{1} << (shape.element_bytes * 8 - 1);
  for (std::uint32_t i = 0; i < shape.elements(); ++i) {
    if (i != certain && random.uniform() >= density) continue;
    const std::uint64_t kind = random.below(20);
    std::uint64_t diff = kind < 17 ? 1 : kind < 19 ? 1 + random.below(40) : kind == 19 ? random.next() : 0;
    if (random.below(200) == 0) diff = top;
    if (random.below(2) == 0) diff = 0 - diff;
    if ((diff & (2 * top - 1)) == 0) diff = 1;
    out.positions.push_back(static_cast<std::uint16_t>(i));
    const auto* const bytes = reinterpret_cast<const std::byte*>(&diff);
    out.diffs.insert(out.diffs.end(), bytes, bytes + shape.element_bytes);
  }
  return out;
}

/// Encodes whatever the size, and decodes to exactly the same changes. Returns the payload's record.
void expect_exact(const TileMemory& tile, const Changes& changes, const std::string& what) {
  ClassEncodeScratch scratch;
  TileRecord record;
  std::vector<std::byte> payload = {std::byte{0x77}};  // what is there already stays
  const std::size_t no_limit = std::numeric_limits<std::size_t>::max();
  const bool coded =
      encode_class(tile.shape, changes.view(), tile.bytes.data(), tile.row_stride, no_limit, scratch, record, payload);
  if (!coded) {
    // The one reason that is left: longer than the raw tile, which a decoder refuses.
    const double widest = static_cast<double>(changes.positions.size()) * (0.9 + 0.25 * tile.shape.element_bytes) + 64;
    ASSERT_LT(static_cast<double>(tile.shape.raw_bytes()), widest) << what;
    ASSERT_EQ(payload.size(), 1U);
    return;
  }
  ASSERT_EQ(payload[0], std::byte{0x77});
  record.payload = ByteSpan(payload).subspan(1);
  ASSERT_LE(record.payload.size(), tile.shape.raw_bytes()) << what;
  ASSERT_EQ(record.changed, changes.positions.size());
  const auto decoded = decode_class(active_kernels(), tile.shape, record, tile.bytes.data(), tile.row_stride);
  ASSERT_TRUE(decoded.ok()) << what << ": " << decoded.error().to_string();
  ASSERT_EQ(decoded->count, changes.positions.size()) << what;
  ASSERT_TRUE(std::equal(changes.positions.begin(), changes.positions.end(), decoded->positions)) << what;
  ASSERT_EQ(std::memcmp(decoded->values, changes.diffs.data(), changes.diffs.size()), 0) << what;
}

TEST(ClassCodec, EveryDtypeShapeAndDensityIsExact) {
  Random random(17);
  const std::pair<std::uint32_t, std::uint32_t> shapes[] = {{1, 1}, {1, 9}, {7, 3}, {64, 40}, {3, 1000}, {1, 5000}};
  for (const Dtype dtype : kFloats) {
    for (const auto& [rows, cols] : shapes) {
      for (const Base base : {Base::weights, Base::arbitrary, Base::special, Base::equal}) {
        for (const double density : {0.0, 0.003, 0.05, 0.5, 1.0}) {
          TileMemory tile(dtype, rows, cols, random.below(3));
          fill(tile, base, random);
          const Changes changes = change(tile.shape, density, random);
          expect_exact(tile, changes,
                       std::string(to_string(dtype)) + " " + std::to_string(rows) + "×" + std::to_string(cols) +
                           " base " + std::to_string(static_cast<int>(base)) + " density " + std::to_string(density));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(ClassCodec, TheLargestTile) {
  Random random(18);
  for (const Dtype dtype : {Dtype::bf16, Dtype::f64}) {
    for (const double density : {0.0, 0.01, 1.0}) {
      TileMemory tile(dtype, 256, 256, 0);
      fill(tile, Base::weights, random);
      expect_exact(tile, change(tile.shape, density, random), std::string(to_string(dtype)));
    }
  }
  // The only change is the last element, the largest gap that there is.
  TileMemory tile(Dtype::bf16, 1, kTileElementsMax, 0);
  Changes last{{kTileElementsMax - 1}, {std::byte{1}, std::byte{0}}};
  expect_exact(tile, last, "the last element");
}

TEST(ClassCodec, NothingIsAppendedAtOrAboveTheLimit) {
  Random random(19);
  TileMemory tile(Dtype::bf16, 64, 64, 0);
  fill(tile, Base::weights, random);
  const Changes changes = change(tile.shape, 0.05, random);
  ClassEncodeScratch scratch;
  const auto encode = [&](std::size_t limit, TileRecord& record, std::vector<std::byte>& out) {
    return encode_class(tile.shape, changes.view(), tile.bytes.data(), tile.row_stride, limit, scratch, record, out);
  };
  TileRecord record;
  std::vector<std::byte> payload;
  ASSERT_TRUE(encode(10'000, record, payload));
  const std::size_t size = record_bytes(record, payload.size()) + payload.size();
  TileRecord untouched;
  std::vector<std::byte> nothing;
  EXPECT_FALSE(encode(size, untouched, nothing));
  EXPECT_TRUE(nothing.empty());
  EXPECT_EQ(untouched.changed, 0U);
  EXPECT_TRUE(encode(size + 1, untouched, nothing));
  EXPECT_EQ(nothing, payload);
}

/// A model of tensors of every dtype whose small elements change most.
struct Step {
  LayoutPtr layout;
  std::vector<std::byte> before;
  std::vector<std::byte> after;
};

Step take_step(double density, std::uint64_t seed) {
  const TestModel model = make_model(seed);
  Step step{model.layout, model.half, model.half};
  mutate(step.after, *model.layout, density, seed);
  return step;
}

std::size_t size_of(const TileRecord& record) {
  return record_bytes(record, record.payload.size()) + record.payload.size();
}

class Compact : public ::testing::TestWithParam<double> {};

TEST_P(Compact, NeverLargerAndTheSameState) {
  ThreadPool pool(2, "test");
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    const Step step = take_step(GetParam(), seed);
    for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
      const Delta delta = encode_between(*step.layout, step.before, step.after, form);
      const auto compacted = compact(*step.layout, delta, step.before, pool);
      ASSERT_TRUE(compacted.ok()) << compacted.error().to_string();
      ASSERT_EQ(compacted->frames.size(), delta.frames.size());
      for (std::size_t i = 0; i < delta.frames.size(); ++i) {
        const Frame& was = delta.frames[i];
        const Frame& is = compacted->frames[i];
        ASSERT_LE(is.bytes.size(), was.bytes.size());
        ASSERT_EQ(is.tiles, was.tiles);
        ASSERT_EQ(is.first_tile, was.first_tile);
        ASSERT_EQ(is.last_tile, was.last_tile);
        const auto old_records = records_of(*step.layout, was.bytes);
        const auto new_records = records_of(*step.layout, is.bytes);
        for (std::size_t r = 0; r < new_records.size(); ++r) {
          ASSERT_LE(size_of(new_records[r]), size_of(old_records[r]));
          if (new_records[r].codec == Codec::rice_class) continue;
          ASSERT_EQ(new_records[r].codec, old_records[r].codec);
          ASSERT_THAT(new_records[r].payload, ::testing::ElementsAreArray(old_records[r].payload));
        }
        // What is compact already stays as it is.
        EXPECT_EQ(compact_frame(*step.layout, is, step.before).value().bytes, is.bytes);
      }
      expect_round_trip(*step.layout, step.before, step.after, *compacted);
      const auto read = from_container(to_container(*compacted), *step.layout);
      ASSERT_TRUE(read.ok()) << read.error().to_string();
      for (std::size_t c = 0; c < kCodecEnd; ++c) {
        EXPECT_EQ(read->stats[c].tiles, compacted->stats[c].tiles);
        EXPECT_EQ(read->stats[c].bytes, compacted->stats[c].bytes);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Densities, Compact, ::testing::Values(0.0001, 0.01, 0.1, 0.5, 1.0));

/// Moves only elements of small exponents, so that classes are worth having in each float tensor.
Step move_small_floats(std::uint64_t seed) {
  std::vector<TensorSpec> specs;
  for (const Dtype dtype : kFloats) {
    specs.push_back({std::string(to_string(dtype)), dtype, {100, 300}, {40}, {130}});
  }
  specs.push_back({"integers", Dtype::i16, {100, 300}, {}, {}});
  Step step;
  step.layout = Layout::build(specs).value();
  step.before.resize(step.layout->half_bytes());
  Random random(seed);
  for (const Tensor& tensor : step.layout->tensors()) {
    TileMemory memory(tensor.spec.dtype == Dtype::i16 ? Dtype::bf16 : tensor.spec.dtype, 100, 300, 0);
    fill(memory, Base::weights, random);
    std::copy(memory.bytes.begin(), memory.bytes.end(),
              step.before.begin() + static_cast<std::ptrdiff_t>(tensor.offset));
  }
  step.after = step.before;
  for (const Tensor& tensor : step.layout->tensors()) {
    const unsigned width = tensor.element_bytes;
    for (std::uint64_t i = tensor.offset; i < tensor.offset + tensor.bytes; i += width) {
      std::uint64_t element = 0;
      std::memcpy(&element, &step.after[i], width);
      const std::uint64_t magnitude = element & ((std::uint64_t{1} << (width * 8 - 1)) - 1);
      // The lowest of the exponents that fill() makes.
      const unsigned mantissa = tensor.spec.dtype == Dtype::i16 ? 7 : mantissa_bits(tensor.spec.dtype);
      const bool small = magnitude >> mantissa < (std::uint64_t{1} << (width * 8 - 2 - mantissa)) - 4;
      if (random.below(small ? 3 : 300) == 0) ++element;
      std::memcpy(&step.after[i], &element, width);
    }
  }
  return step;
}

TEST(CompactCases, EveryFloatDtypeGetsClassesAndNoIntegerDoes) {
  const Step step = move_small_floats(3);
  const Delta delta = encode_between(*step.layout, step.before, step.after);
  ThreadPool pool(1, "test");
  const Delta compacted = compact(*step.layout, delta, step.before, pool).value();
  std::vector<bool> in_classes(step.layout->tensors().size());
  for (const Frame& frame : compacted.frames) {
    for (const TileRecord& record : records_of(*step.layout, frame.bytes)) {
      if (record.codec == Codec::rice_class) in_classes[step.layout->tensor_of_tile(record.tile)] = true;
    }
  }
  for (std::size_t t = 0; t < in_classes.size(); ++t) {
    EXPECT_EQ(in_classes[t], dtype_is_float(step.layout->tensors()[t].spec.dtype))
        << step.layout->tensors()[t].spec.name;
  }
  EXPECT_LT(compacted.frame_bytes, delta.frame_bytes * 4 / 5);
  expect_round_trip(*step.layout, step.before, step.after, compacted);
}

TEST(CompactCases, ABadFrameIsRefusedAndAnEmptyOneStaysEmpty) {
  const Step step = take_step(0.02, 5);
  Delta delta = encode_between(*step.layout, step.before, step.after);
  EXPECT_TRUE(compact_frame(*step.layout, Frame(), step.before).value().bytes.empty());
  delta.frames.at(0).bytes.back() ^= std::byte{1};
  const auto frame = compact_frame(*step.layout, delta.frames[0], step.before);
  ASSERT_FALSE(frame.ok());
  EXPECT_EQ(frame.error().code(), Errc::corrupt);
  ThreadPool pool(2, "test");
  EXPECT_FALSE(compact(*step.layout, delta, step.before, pool).ok());
}

TEST(CompactCases, AWrongBaseIsFoundAndNothingIsWritten) {
  const Step step = move_small_floats(4);
  ThreadPool pool(1, "test");
  const Delta delta = encode_between(*step.layout, step.before, step.after);
  const Delta compacted = compact(*step.layout, delta, step.before, pool).value();
  const auto digests = digests_of(*step.layout, step.before);
  std::uint64_t refused = 0;
  for (const Frame& frame : compacted.frames) {
    for (const TileRecord& record : records_of(*step.layout, frame.bytes)) {
      if (record.codec != Codec::rice_class) continue;
      std::vector<std::byte> wrong = step.after;
      const auto digest = apply_tile(*step.layout, record, tile_in(*step.layout, wrong, record.tile),
                                     stride_of(*step.layout, record.tile), digests[record.tile]);
      ASSERT_FALSE(digest.ok());
      EXPECT_EQ(digest.error().code(), Errc::corrupt);
      EXPECT_THAT(digest.error().message(), ::testing::HasSubstr("tile " + std::to_string(record.tile) + " of "));
      ASSERT_EQ(wrong, step.after);
      ++refused;
    }
  }
  EXPECT_GT(refused, 0U);
}

}  // namespace
}  // namespace deltasync::delta::test
