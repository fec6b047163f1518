// What the delta tests share: encoding between two halves and applying the result to a copy.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "delta/codec.hpp"
#include "delta/delta.hpp"
#include "delta/encode.hpp"
#include "format/tiling.hpp"
#include "tests/support/model.hpp"

namespace deltasync::delta::test {

using deltasync::test::make_model;
using deltasync::test::mutate;
using deltasync::test::Random;
using deltasync::test::same_bytes;
using deltasync::test::sample_specs;
using deltasync::test::TestModel;

inline constexpr VersionId kFrom{7, 1};
inline constexpr VersionId kTo{7, 2};

/// The kernels that this CPU can run.
inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> out;
  for (const char* name : {"scalar", "avx2", "avx512", "neon"}) {
    if (const Kernels* kernels = find_kernels(name)) out.push_back(kernels);
  }
  return out;
}

inline std::vector<std::uint64_t> digests_of(const Layout& layout, ByteSpan half) {
  ThreadPool pool(1, "test");
  std::vector<std::uint64_t> digests(layout.tile_count());
  half_digests(layout, half, digests, pool);
  return digests;
}

inline Delta encode_between(const Layout& layout, ByteSpan before, ByteSpan after, ValueForm form = ValueForm::ulp,
                            const Kernels& kernels = active_kernels(), unsigned threads = 1) {
  ThreadPool pool(threads, "test");
  std::vector<std::uint64_t> digests = digests_of(layout, before);
  EncodeRequest request;
  request.from = kFrom;
  request.to = kTo;
  request.from_root = root_digest(digests);
  request.form = form;
  Delta delta = encode_with(kernels, layout, before, after, digests, request, pool);
  EXPECT_EQ(digests, digests_of(layout, after)) << "incremental digests differ from recomputed ones";
  return delta;
}

/// The records of a frame that must be valid.
inline std::vector<TileRecord> records_of(const Layout& layout, ByteSpan frame) {
  auto records = parse_frame(layout, frame);
  EXPECT_TRUE(records.ok()) << records.error().to_string();
  return records.ok() ? std::move(records).value() : std::vector<TileRecord>();
}

inline TensorMemory memory_in(const Layout& layout, std::vector<std::byte>& half, std::uint32_t tensor) {
  const Tensor& t = layout.tensors()[tensor];
  return {half.data() + t.offset, static_cast<std::size_t>(t.row_bytes())};
}

/// A tile's first element in a half.
inline std::byte* tile_in(const Layout& layout, std::vector<std::byte>& half, std::uint64_t index) {
  const Tile tile = tile_of(layout, index);
  return tile_address(memory_in(layout, half, tile.tensor), tile, layout.tensors()[tile.tensor].element_bytes);
}
inline std::size_t stride_of(const Layout& layout, std::uint64_t tile) {
  return static_cast<std::size_t>(layout.tensors()[layout.tensor_of_tile(tile)].row_bytes());
}

/// Decodes `delta` over a copy of `before` by every path and expects `after` each time.
inline void expect_round_trip(const Layout& layout, const std::vector<std::byte>& before,
                              const std::vector<std::byte>& after, const Delta& delta) {
  std::vector<std::byte> applied = before;
  std::vector<std::byte> committed = before;
  std::vector<std::byte> restored = after;
  std::vector<std::uint64_t> digests = digests_of(layout, before);
  for (const Frame& frame : delta.frames) {
    const auto parsed = parse_frame(layout, frame.bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.error().to_string();
    ASSERT_EQ(frame.tiles, parsed->size());
    ASSERT_EQ(frame.first_tile, parsed->front().tile);
    ASSERT_EQ(frame.last_tile, parsed->back().tile);
    for (const TileRecord& record : *parsed) {
      const std::size_t stride = stride_of(layout, record.tile);
      std::byte* const first = tile_in(layout, committed, record.tile);
      const std::vector<std::byte> untouched = committed;
      const auto verified = verify_tile(layout, record, first, stride, digests[record.tile]);
      ASSERT_TRUE(verified.ok()) << verified.error().to_string();
      ASSERT_TRUE(same_bytes(untouched, committed)) << "verify_tile wrote";
      std::vector<std::byte> undo;
      save_undo(layout, record, first, stride, undo);
      ASSERT_EQ(undo.empty(), record.codec == Codec::rice_ulp || record.codec == Codec::dense_ulp);
      std::vector<std::byte> resolved(resolved_bytes(layout, record));
      const auto again = resolve_tile(layout, record, first, stride, digests[record.tile], resolved);
      ASSERT_TRUE(again.ok()) << again.error().to_string();
      ASSERT_EQ(*again, *verified);
      ASSERT_TRUE(same_bytes(untouched, committed)) << "resolve_tile wrote";
      exchange_tile(layout, record, first, stride, resolved);
      if (!traits(record.codec).whole_tile) {
        ASSERT_EQ(tile_digest(layout, committed, record.tile), *verified);
        exchange_tile(layout, record, first, stride, resolved);
      }
      ASSERT_TRUE(same_bytes(untouched, committed)) << "the second exchange does not undo the first";
      commit_tile(layout, record, first, stride);
      undo_tile(layout, record, tile_in(layout, restored, record.tile), stride, undo);
      const auto digest =
          apply_tile(layout, record, tile_in(layout, applied, record.tile), stride, digests[record.tile]);
      ASSERT_TRUE(digest.ok()) << digest.error().to_string();
      ASSERT_EQ(*digest, *verified);
      digests[record.tile] = *digest;
    }
  }
  EXPECT_TRUE(same_bytes(applied, after));
  EXPECT_TRUE(same_bytes(committed, after));
  EXPECT_TRUE(same_bytes(restored, before));
  EXPECT_EQ(root_digest(digests), delta.to_root);
}

}  // namespace deltasync::delta::test
