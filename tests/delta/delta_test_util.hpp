// What the delta tests share: encoding between two halves and applying the result to a copy.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "delta/delta.hpp"
#include "delta/encode.hpp"
#include "tests/support/model.hpp"

namespace deltasync::delta::test {

using deltasync::test::make_model;
using deltasync::test::mutate;
using deltasync::test::Random;
using deltasync::test::sample_specs;
using deltasync::test::TestModel;

inline constexpr VersionId kFrom{7, 1};
inline constexpr VersionId kTo{7, 2};

/// The kernels that this CPU can run.
inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> out;
  for (const char* name : {"scalar", "avx2", "avx512"}) {
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

/// The records of a frame that must be sound.
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
  const Tile tile = layout.tile(index);
  return tile_address(memory_in(layout, half, tile.tensor), tile, layout.tensors()[tile.tensor].element_bytes);
}
inline std::size_t stride_of(const Layout& layout, std::uint64_t tile) {
  return static_cast<std::size_t>(layout.tensors()[layout.tensor_of_tile(tile)].row_bytes());
}

}  // namespace deltasync::delta::test
