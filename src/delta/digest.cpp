// State digests (delta_format.md "State digest").
#include <algorithm>

#include "base/form_choice.hpp"
#include "base/hash.hpp"
#include "delta/delta.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {

namespace {

std::uint64_t rows_digest(const Kernels& kernels, const std::byte* first, std::size_t row_stride, std::uint64_t rows,
                          std::uint64_t row_bytes) {
  if (row_stride == row_bytes && row_bytes % 8 == 0) return kernels.digest_run(first, rows * row_bytes, 0);
  const std::uint64_t words_per_row = (row_bytes + 7) / 8;
  std::uint64_t sum = 0;
  for (std::uint64_t r = 0; r < rows; ++r)
    sum += kernels.digest_run(first + r * row_stride, row_bytes, r * words_per_row);
  return sum;
}

/// All tiles of a strip: row by row over all panels, so that memory is read in its order.
void strip_digests(const Kernels& kernels, const Strip& strip, ByteSpan half, std::span<std::uint64_t> digests) {
  const std::size_t stride = strip.tensor->row_bytes();
  if (strip.panels == 1 || strip.rows == 1) {
    for (std::uint32_t p = 0; p < strip.panels; ++p) {
      digests[strip.first_tile + p] =
          rows_digest(kernels, half.data() + strip.offset(p), stride, strip.rows, strip.shape(p).row_bytes());
    }
    return;
  }
  std::fill_n(digests.begin() + static_cast<std::ptrdiff_t>(strip.first_tile), strip.panels, 0);
  for (std::uint64_t r = 0; r < strip.rows; ++r) {
    for (std::uint32_t p = 0; p < strip.panels; ++p) {
      const TileShape shape = strip.shape(p);
      digests[strip.first_tile + p] +=
          kernels.digest_run(half.data() + strip.offset(p) + r * stride, shape.row_bytes(), r * shape.words_per_row());
    }
  }
}

/// Of the forms that the active kernels have. Usual is past the caches, one page at a time. Timed from the first copy
/// on: full updates are too rare to leave out those that touch pages first, which cost each form alike.
FormChoice& copy_digest_choice() {
  static const auto& forms = active_kernels().copy_digests;
  static FormChoice choice(static_cast<unsigned>(std::find(std::begin(forms), std::end(forms), nullptr) - forms),
                           forms[1] != nullptr ? 1 : 0);
  return choice;
}

}  // namespace

std::uint64_t tile_digest(const std::byte* first, std::size_t row_stride, std::uint64_t rows, std::uint64_t row_bytes) {
  return rows_digest(active_kernels(), first, row_stride, rows, row_bytes);
}

std::uint64_t copy_tile_digest(std::byte* to, std::size_t to_stride, const std::byte* from, std::size_t from_stride,
                               std::uint64_t rows, std::uint64_t row_bytes) {
  if (to_stride == row_bytes && from_stride == row_bytes && row_bytes % 8 == 0) {
    row_bytes *= rows;
    rows = 1;
  }
  const std::uint64_t words_per_row = (row_bytes + 7) / 8;
  std::uint64_t sum = 0;
  copy_digest_choice().run(rows * row_bytes, true, [&](unsigned form) {
    const Kernels::CopyDigestFn copy_digest = active_kernels().copy_digests[form];
    for (std::uint64_t r = 0; r < rows; ++r) {
      sum += copy_digest(to + r * to_stride, from + r * from_stride, row_bytes, r * words_per_row);
    }
  });
  return sum;
}

std::uint64_t tile_digest(const Layout& layout, ByteSpan half, std::uint64_t tile) {
  const Tile at = tile_of(layout, tile);
  const Tensor& tensor = layout.tensors()[at.tensor];
  const std::byte* const first =
      half.data() + tensor.offset + at.rect.row * tensor.row_bytes() + at.rect.col * tensor.element_bytes;
  return tile_digest(first, tensor.row_bytes(), at.rect.rows, at.rect.cols * tensor.element_bytes);
}

void half_digests(const Layout& layout, ByteSpan half, std::span<std::uint64_t> digests, ThreadPool& pool) {
  const Kernels& kernels = active_kernels();
  const std::vector<Batch> batches = make_batches(layout);
  const auto digest_batch = [&](std::uint64_t i, unsigned) {
    for_each_strip(layout, batches[i].first, batches[i].end,
                   [&](const Strip& strip) { strip_digests(kernels, strip, half, digests); });
  };
  pool.run(batches.size(), digest_batch);
}

Digest128 root_digest(std::span<const std::uint64_t> digests) {
  return xxh3_128(std::as_bytes(digests));
}

}  // namespace deltasync::delta
