// encode → container → parse → verify, apply, commit, undo: every dtype, awkward shapes, all densities.
#include <gmock/gmock-matchers.h>

#include <map>
#include <numeric>

#include "delta_test_util.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta::test {
namespace {

class RoundTrip : public ::testing::TestWithParam<double> {};

TEST_P(RoundTrip, SampleModel) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const TestModel model = make_model(seed);
    std::vector<std::byte> after = model.half;
    mutate(after, *model.layout, GetParam(), seed);
    for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
      const Delta delta = encode_between(*model.layout, model.half, after, form);
      expect_round_trip(*model.layout, model.half, after, delta);
      if (form == ValueForm::absolute) {
        EXPECT_EQ(delta.stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 0U);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Densities, RoundTrip, ::testing::Values(0.0001, 0.01, 0.1, 0.5, 1.0));

TEST(RoundTripCases, EveryCodecIsUsed) {
  const TestModel model = make_model(5);
  std::vector<std::byte> after = model.half;
  mutate(after, *model.layout, 0.01, 5);
  const Delta ulp = encode_between(*model.layout, model.half, after);
  EXPECT_GT(ulp.stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 0U);
  const Delta absolute = encode_between(*model.layout, model.half, after, ValueForm::absolute);
  EXPECT_GT(absolute.stats[static_cast<unsigned>(Codec::rice_absolute)].tiles, 0U);
  const TestModel other = make_model(6);
  const Delta raw = encode_between(*model.layout, model.half, other.half);
  EXPECT_GT(raw.stats[static_cast<unsigned>(Codec::raw)].tiles, 0U);
  expect_round_trip(*model.layout, model.half, other.half, raw);
}

TEST(RoundTripCases, AnUnchangedHalfMakesNoFrame) {
  const TestModel model = make_model(9);
  const Delta delta = encode_between(*model.layout, model.half, model.half);
  EXPECT_TRUE(delta.frames.empty());
  EXPECT_EQ(delta.changed, 0U);
  EXPECT_EQ(delta.from_root, delta.to_root);
}

/// Writes a tile of `from` into `to`.
void copy_tile_of(const Layout& layout, std::uint64_t tile, ByteSpan from, std::vector<std::byte>& to) {
  const Tile at = tile_of(layout, tile);
  const Tensor& tensor = layout.tensors()[at.tensor];
  for (std::uint64_t r = 0; r < at.rect.rows; ++r) {
    const std::size_t begin = static_cast<std::size_t>(tensor.offset + (at.rect.row + r) * tensor.row_bytes() +
                                                       at.rect.col * tensor.element_bytes);
    std::copy_n(from.data() + begin, at.rect.cols * tensor.element_bytes, to.data() + begin);
  }
}

/// Batch by batch, each as soon as its own bytes are there, in any order: the same delta as in one go.
TEST(RoundTripCases, PiecesInAnyOrderMakeTheSameDelta) {
  // Batches that end within a tensor and between the panels of a band; small tensors before and behind.
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 50; ++i) specs.push_back({"small" + std::to_string(i), Dtype::f32, {5, 8}, {}, {}});
  TensorSpec wide{"wide", Dtype::bf16, {24, 1u << 17}, {}, {}};
  for (std::uint64_t c = 2048; c < 1u << 17; c += 2048) wide.col_cuts.push_back(c);
  specs.push_back(wide);
  specs.push_back({"tall", Dtype::bf16, {5000, 1024}, {}, {}});
  for (int i = 0; i < 50; ++i) specs.push_back({"tail" + std::to_string(i), Dtype::bf16, {3, 7}, {}, {}});
  const TestModel model = make_model(12, specs);
  const Layout& layout = *model.layout;
  std::vector<std::byte> after = model.half;
  mutate(after, layout, 0.01, 12);
  const Delta whole = encode_between(layout, model.half, after);
  const std::vector<Batch> batches = make_batches(layout);
  ASSERT_GT(batches.size(), 3U);
  ThreadPool pool(2, "test");
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Random random(seed);
    std::vector<std::uint32_t> order(batches.size());
    std::iota(order.begin(), order.end(), 0U);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::vector<std::byte> filling(after.size());
    for (std::byte& b : filling) b = static_cast<std::byte>(random.next());
    Encoding encoding(layout, batches, model.half, filling, digests_of(layout, model.half), ValueForm::ulp);
    for (const std::uint32_t batch : order) {
      for (std::uint64_t t = batches[batch].first; t < batches[batch].end; ++t) {
        copy_tile_of(layout, t, after, filling);
      }
      if (random.below(4) == 0) continue;  // left to finish()
      const std::uint32_t twice[] = {batch, batch};
      encoding.run_overlapped(std::span(twice).first(1 + random.below(2)), pool);
    }
    const Delta delta = encoding.finish({whole.from, whole.to, whole.from_root, ValueForm::ulp}, pool);
    EXPECT_EQ(to_container(delta), to_container(whole));
    for (std::size_t c = 0; c < kCodecEnd; ++c) {
      EXPECT_EQ(delta.stats[c].tiles, whole.stats[c].tiles);
      EXPECT_EQ(delta.stats[c].bytes, whole.stats[c].bytes);
    }
    EXPECT_EQ(encoding.take_digests(), digests_of(layout, after));
  }
}

std::vector<TensorSpec> one_tensor(Dtype dtype, std::vector<std::uint64_t> shape) {
  TensorSpec spec;
  spec.name = "t";
  spec.dtype = dtype;
  spec.shape = std::move(shape);
  return {spec};
}

/// Writes an element's bit pattern.
void put(std::vector<std::byte>& half, std::size_t index, std::uint64_t pattern, std::size_t width) {
  std::memcpy(half.data() + index * width, &pattern, width);
}

/// Every ordered pair of these patterns is a change: far enough from the next one that sparse codecs are the smallest,
/// among enough steps of one ulp that the one for ulp differences is.
void expect_pairs_round_trip(Dtype dtype, const std::vector<std::uint64_t>& patterns) {
  constexpr std::size_t kApart = 23;  // no divisor of a vector; and too far for dense tiles
  const std::size_t width = dtype_bytes(dtype);
  const std::size_t n = patterns.size() * patterns.size();
  const auto layout = Layout::build(one_tensor(dtype, {n * kApart})).value();
  std::vector<std::byte> before(layout->half_bytes());
  std::vector<std::byte> after(layout->half_bytes());
  for (std::size_t i = 0; i < n; ++i) {
    put(before, i * kApart, patterns[i % patterns.size()], width);
    put(after, i * kApart, patterns[i / patterns.size()], width);
    for (const std::size_t step : {3U, 6U, 9U, 12U}) put(after, i * kApart + step, 1, width);
  }
  for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
    const Delta delta = encode_between(*layout, before, after, form);
    const Codec codec = form == ValueForm::ulp ? Codec::rice_ulp : Codec::rice_absolute;
    EXPECT_EQ(delta.stats[static_cast<unsigned>(codec)].tiles, layout->tile_count()) << to_string(dtype);
    expect_round_trip(*layout, before, after, delta);
  }
}

// Patterns where the ulp map, the sign and the magnitude can go wrong: zeros of both signs, the largest finite values,
// infinities, NaN payloads, all ones.
TEST(RoundTripCases, EveryPairOfSpecialPatternsOfEachDtype) {
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::i64,
                            Dtype::i32, Dtype::i16, Dtype::i8, Dtype::u8, Dtype::boolean}) {
    const std::size_t width = dtype_bytes(dtype);
    const std::uint64_t top = std::uint64_t{1} << (width * 8 - 1);
    std::vector<std::uint64_t> patterns = {0, 1, 2, top - 1, top, top + 1, top - 2, ~std::uint64_t{0}, top / 2};
    for (unsigned b = 0; b < width * 8; ++b) patterns.push_back(std::uint64_t{1} << b);
    expect_pairs_round_trip(dtype, patterns);
  }
}

TEST(RoundTripCases, EveryPairOfPatternsOfOneByte) {
  std::vector<std::uint64_t> patterns(256);
  std::iota(patterns.begin(), patterns.end(), 0);
  for (const Dtype dtype : {Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::i8, Dtype::u8, Dtype::boolean}) {
    expect_pairs_round_trip(dtype, patterns);
  }
}

// Every 16-bit pattern moved by one ulp and by a wide jump, with the codec forced to ulp by small moves.
TEST(RoundTripCases, EveryPatternOfSixteenBits) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::i16}) {
    const auto layout = Layout::build(one_tensor(dtype, {256, 256})).value();
    std::vector<std::byte> before(layout->half_bytes());
    for (std::size_t i = 0; i < 65536; ++i) put(before, i, i, 2);
    for (const std::uint64_t step : {std::uint64_t{1}, std::uint64_t{0xFFFF}, std::uint64_t{0x8000}}) {
      std::vector<std::byte> after = before;
      for (std::size_t i = 0; i < 65536; i += step == 0x8000 ? 97 : 1) put(after, i, i + step, 2);
      const Delta delta = encode_between(*layout, before, after);
      const std::uint64_t in_differences = delta.stats[static_cast<unsigned>(Codec::rice_ulp)].tiles +
                                           delta.stats[static_cast<unsigned>(Codec::dense_ulp)].tiles;
      EXPECT_EQ(in_differences, step == 0x8000 ? 0U : 1U);
      expect_round_trip(*layout, before, after, delta);
    }
  }
}

TEST(RoundTripCases, OneChangeAtEachEndOfEachTile) {
  const TestModel model = make_model(12);
  const Layout& layout = *model.layout;
  for (const bool at_end : {false, true}) {
    std::vector<std::byte> after = model.half;
    for (std::uint64_t index = 0; index < layout.tile_count(); ++index) {
      const Tile tile = tile_of(layout, index);
      const std::size_t width = layout.tensors()[tile.tensor].element_bytes;
      std::byte* at = tile_in(layout, after, index);
      if (at_end) at += (tile.rect.rows - 1) * stride_of(layout, index) + tile.rect.cols * width - 1;
      *at ^= std::byte{1};
    }
    const Delta delta = encode_between(layout, model.half, after);
    std::uint64_t tiles = 0;
    for (const Frame& frame : delta.frames) tiles += frame.tiles;
    EXPECT_EQ(tiles, layout.tile_count());
    expect_round_trip(layout, model.half, after, delta);
  }
}

// Small unchanged tensors are passed over many at a time: none that changed may go with them.
TEST(RoundTripCases, OneChangeAmongManySmallTensors) {
  std::vector<TensorSpec> specs;
  for (unsigned i = 0; i < 48; ++i) {
    constexpr std::uint64_t kShapes[][2] = {{1, 512}, {1, 3}, {5, 200}, {1, 33}, {40, 512}, {1, 2048}};
    specs.push_back(one_tensor(Dtype::bf16, {kShapes[i % 6][0], kShapes[i % 6][1]}).front());
    specs.back().name += std::to_string(i);
  }
  const TestModel model = make_model(31, specs);
  const Layout& layout = *model.layout;
  for (const Tensor& tensor : layout.tensors()) {
    for (const std::uint64_t at : {tensor.offset, tensor.offset + tensor.bytes - 1}) {
      std::vector<std::byte> after = model.half;
      after[at] ^= std::byte{1};
      const Delta delta = encode_between(layout, model.half, after);
      ASSERT_EQ(delta.changed, 1U) << tensor.spec.name;
      expect_round_trip(layout, model.half, after, delta);
    }
  }
}

// A receiver may keep a tensor with any row stride at any address.
TEST(RoundTripCases, AppliesThroughAnyStrideAndAlignment) {
  for (const std::uint64_t cols : {7U, 64U, 1000U}) {
    const auto layout = Layout::build(one_tensor(Dtype::bf16, {100, cols})).value();
    const TestModel model = make_model(cols, one_tensor(Dtype::bf16, {100, cols}));
    std::vector<std::byte> after = model.half;
    mutate(after, *layout, 0.05, 3);
    const Delta delta = encode_between(*layout, model.half, after);
    const auto digests = digests_of(*layout, model.half);
    for (const std::size_t extra : {0U, 2U, 13U}) {
      const std::size_t row_bytes = cols * 2;
      const std::size_t stride = row_bytes + extra;
      std::vector<std::byte> memory(1 + 100 * stride, std::byte{0xEE});
      for (std::size_t r = 0; r < 100; ++r) std::memcpy(&memory[1 + r * stride], &model.half[r * row_bytes], row_bytes);
      for (const TileRecord& record : records_of(*layout, delta.frames.at(0).bytes)) {
        const Tile tile = tile_of(*layout, record.tile);
        std::byte* const first = memory.data() + 1 + tile.rect.row * stride + tile.rect.col * 2;
        const auto digest = apply_tile(*layout, record, first, stride, digests[record.tile]);
        ASSERT_TRUE(digest.ok()) << digest.error().to_string();
      }
      for (std::size_t r = 0; r < 100; ++r) {
        ASSERT_EQ(std::memcmp(&memory[1 + r * stride], &after[r * row_bytes], row_bytes), 0) << "row " << r;
        for (std::size_t e = 0; e < extra; ++e) ASSERT_EQ(memory[1 + r * stride + row_bytes + e], std::byte{0xEE});
      }
    }
  }
}

TEST(Verify, AWrongBaseIsFoundAndNothingIsWritten) {
  const TestModel model = make_model(21);
  std::vector<std::byte> after = model.half;
  mutate(after, *model.layout, 0.02, 21);
  const Delta delta = encode_between(*model.layout, model.half, after);
  const auto digests = digests_of(*model.layout, model.half);
  for (const Frame& frame : delta.frames) {
    for (const TileRecord& record : records_of(*model.layout, frame.bytes)) {
      if (record.codec != Codec::rice_ulp) continue;
      std::vector<std::byte> wrong = after;  // every changed place differs from the base
      const auto digest = apply_tile(*model.layout, record, tile_in(*model.layout, wrong, record.tile),
                                     stride_of(*model.layout, record.tile), digests[record.tile]);
      ASSERT_FALSE(digest.ok());
      EXPECT_EQ(digest.error().code(), Errc::corrupt);
      EXPECT_THAT(digest.error().message(), ::testing::HasSubstr("tile " + std::to_string(record.tile) + " of "));
      ASSERT_EQ(wrong, after);
    }
  }
}

TEST(Verify, AbsoluteAndRawRecordsAreIdempotent) {
  const TestModel model = make_model(22);
  std::vector<std::byte> after = model.half;
  mutate(after, *model.layout, 0.05, 22);
  const Delta delta = encode_between(*model.layout, model.half, after, ValueForm::absolute);
  std::vector<std::byte> twice = after;
  auto digests = digests_of(*model.layout, after);
  for (const Frame& frame : delta.frames) {
    for (const TileRecord& record : records_of(*model.layout, frame.bytes)) {
      ASSERT_TRUE(apply_tile(*model.layout, record, tile_in(*model.layout, twice, record.tile),
                             stride_of(*model.layout, record.tile), digests[record.tile])
                      .ok());
    }
  }
  EXPECT_EQ(twice, after);
}

TEST(Batches, CoverAllTilesInOrderWithinTheirBounds) {
  auto specs = sample_specs();
  TensorSpec wide;  // one band of many panels, larger than a batch
  wide.name = "wide";
  wide.dtype = Dtype::f32;
  wide.shape = {64, 1024 * 128};
  for (std::uint64_t cut = 1024; cut < 1024 * 128; cut += 1024) wide.col_cuts.push_back(cut);
  specs.push_back(wide);
  TensorSpec line;  // one row of many tiles
  line.name = "line";
  line.dtype = Dtype::bf16;
  line.shape = {65536 * 100};
  specs.push_back(line);
  const auto layout = Layout::build(specs).value();
  std::uint64_t next = 0;
  for (const Batch& batch : make_batches(*layout)) {
    ASSERT_EQ(batch.first, next);
    ASSERT_LT(batch.first, batch.end);
    ASSERT_LE(batch.end - batch.first, kBatchTilesMax);
    std::uint64_t bytes = 0;
    for (std::uint64_t t = batch.first; t < batch.end; ++t) {
      const Tile tile = tile_of(*layout, t);
      bytes += tile.rect.elements() * layout->tensors()[tile.tensor].element_bytes;
    }
    ASSERT_LE(bytes, kBatchBytesTarget);
    next = batch.end;
  }
  EXPECT_EQ(next, layout->tile_count());
}

TEST(Batches, ManySmallTensorsShareABatch) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 5000; ++i) {
    specs.push_back(one_tensor(Dtype::bf16, {16}).front());
    specs.back().name += std::to_string(i);
  }
  const auto batches = make_batches(*Layout::build(specs).value());
  ASSERT_EQ(batches.size(), 2U);
  EXPECT_EQ(batches[0].end, kBatchTilesMax);
}

TEST(Frames, CutKeepsExactlyTheWantedTiles) {
  const TestModel model = make_model(31);
  std::vector<std::byte> after = model.half;
  mutate(after, *model.layout, 0.02, 31);
  Random random(4);
  for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
    const Delta delta = encode_between(*model.layout, model.half, after, form);
    for (const Frame& frame : delta.frames) {
      const auto all = records_of(*model.layout, frame.bytes);
      for (int trial = 0; trial < 20; ++trial) {
        std::vector<Batch> wanted;
        for (std::uint64_t at = random.below(3); at < model.layout->tile_count(); at += 1 + random.below(4)) {
          const std::uint64_t first = at;
          at += 1 + random.below(5);
          wanted.push_back({first, at});
        }
        std::vector<TileRecord> expected;
        for (const TileRecord& record : all) {
          for (const Batch& range : wanted) {
            if (record.tile >= range.first && record.tile < range.end) expected.push_back(record);
          }
        }
        const Frame cut = cut_frame(frame, wanted);
        ASSERT_EQ(cut.tiles, expected.size());
        if (expected.empty()) {
          ASSERT_TRUE(cut.bytes.empty());
          continue;
        }
        const auto records = records_of(*model.layout, cut.bytes);
        ASSERT_EQ(cut.first_tile, records.front().tile);
        ASSERT_EQ(cut.last_tile, records.back().tile);
        for (std::size_t i = 0; i < records.size(); ++i) {
          ASSERT_EQ(records[i].tile, expected[i].tile);
          ASSERT_EQ(records[i].digest_after, expected[i].digest_after);
          ASSERT_THAT(records[i].payload, ::testing::ElementsAreArray(expected[i].payload));
        }
      }
      const std::vector<Batch> everything = {{0, model.layout->tile_count()}};
      ASSERT_EQ(cut_frame(frame, everything).bytes, frame.bytes);
    }
  }
}

/// Marks only spare reading.
TEST(Frames, CutsAreTheSameWithoutMarks) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 1000; ++i) specs.push_back({"t" + std::to_string(i), Dtype::bf16, {8}, {}, {}});
  const TestModel model = make_model(43, std::move(specs));
  std::vector<std::byte> after = model.half;
  test::mutate(after, *model.layout, 0.2, 44);
  const Delta delta = encode_between(*model.layout, model.half, after);
  ASSERT_EQ(delta.frames.size(), 1u);
  const Frame& frame = delta.frames[0];
  ASSERT_GT(frame.tiles, 5 * kFrameMarkRecords);
  EXPECT_EQ(frame.marks.size(), (frame.tiles - 1) / kFrameMarkRecords);
  Frame unmarked = frame;
  unmarked.marks.clear();
  Random random(45);
  CutSize all;
  FrameBuilder joined;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Batch> wanted;
    for (std::uint64_t at = random.below(200); at < 1000; at += 1 + random.below(400)) {
      const std::uint64_t first = at;
      at += 1 + random.below(40);
      wanted.push_back({first, at});
    }
    const Frame cut = cut_frame(frame, wanted);
    ASSERT_EQ(cut.bytes, cut_frame(unmarked, wanted).bytes);
    ASSERT_EQ(cut_size(frame, wanted).bytes, cut.bytes.size());
  }
  // What is joined is what one cut would have been.
  for (std::uint64_t at = 10; at < 1000; at += 70) {
    const Batch wanted[] = {{at, at + 9}};
    all = cut_size(frame, wanted, all);
    cut_into(joined, frame, wanted);
  }
  EXPECT_EQ(joined.bytes(), all.bytes);
  EXPECT_EQ(joined.finish().bytes.size(), all.bytes);
}

TEST(Frames, RawFramesRepairAnyTile) {
  const TestModel model = make_model(41);
  const TestModel other = make_model(42);
  const auto digests = digests_of(*model.layout, model.half);
  std::vector<std::uint64_t> tiles;
  for (std::uint64_t t = 0; t < model.layout->tile_count(); t += 2) tiles.push_back(t);
  const Frame frame = raw_frame(*model.layout, model.half, tiles, digests);
  EXPECT_EQ(frame.tiles, tiles.size());
  std::vector<std::byte> memory = other.half;
  for (const TileRecord& record : records_of(*model.layout, frame.bytes)) {
    // A raw tile needs no base: the digest before may be anything.
    ASSERT_TRUE(apply_tile(*model.layout, record, tile_in(*model.layout, memory, record.tile),
                           stride_of(*model.layout, record.tile), 12345)
                    .ok());
  }
  const auto repaired = digests_of(*model.layout, memory);
  const auto damaged = digests_of(*model.layout, other.half);
  for (std::uint64_t t = 0; t < model.layout->tile_count(); ++t) {
    ASSERT_EQ(repaired[t], t % 2 == 0 ? digests[t] : damaged[t]);
  }
  EXPECT_TRUE(raw_frame(*model.layout, model.half, {}, digests).bytes.empty());
}

}  // namespace
}  // namespace deltasync::delta::test
