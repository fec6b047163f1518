#include "delta/geometry.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {

TileShape tile_shape(const Layout& layout, std::uint64_t tile) {
  const Tile t = tile_of(layout, tile);
  const Tensor& tensor = layout.tensors()[t.tensor];
  return {static_cast<std::uint32_t>(t.rect.rows), static_cast<std::uint32_t>(t.rect.cols), tensor.element_bytes,
          dtype_is_float(tensor.spec.dtype), mantissa_bits(tensor.spec.dtype)};
}

std::uint8_t mantissa_bits(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::f64: return 52;
    case Dtype::f32: return 23;
    case Dtype::f16: return 10;
    case Dtype::bf16: return 7;
    case Dtype::f8_e4m3:
    case Dtype::f8_e4m3fnuz: return 3;
    case Dtype::f8_e5m2:
    case Dtype::f8_e5m2fnuz: return 2;
    default: return 0;
  }
}

std::string tile_name(const Layout& layout, std::uint64_t tile) {
  std::string name = "tile " + std::to_string(tile);
  if (tile < layout.tile_count()) name += " of " + layout.tensors()[layout.tensor_of_tile(tile)].spec.name;
  return name;
}

namespace {

/// Gathers units (runs of tiles that stay together) into batches.
class BatchBuilder {
 public:
  void add(std::uint64_t tiles, std::uint64_t bytes) {
    const bool full = bytes_ + bytes > kBatchBytesTarget || next_ - first_ + tiles > kBatchTilesMax;
    if (full && next_ > first_) close();
    next_ += tiles;
    bytes_ += bytes;
  }
  std::vector<Batch> finish() {
    if (next_ > first_) close();
    return std::move(batches_);
  }

 private:
  void close() {
    batches_.push_back({first_, next_});
    first_ = next_;
    bytes_ = 0;
  }
  std::vector<Batch> batches_;
  std::uint64_t first_ = 0;
  std::uint64_t next_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace

// A band of several rows and panels stays whole, since its panels share the rows that are scanned. A band of one row
// (its tiles lie one after the other), or one that is too large for a batch, is cut between panels.
std::vector<Batch> make_batches(const Layout& layout) {
  BatchBuilder builder;
  for (std::uint32_t index = 0; index < layout.tensors().size(); ++index) {
    const Tensor& tensor = layout.tensors()[index];
    if (tensor.tile_count == 0) continue;
    if (tensor.tile_count == 1) {
      builder.add(1, tensor.bytes);
      continue;
    }
    const TileGrid grid = grid_of(layout, index);
    const std::uint64_t panels = grid.panels();
    for (std::uint64_t band = 0; band < grid.bands(); ++band) {
      const std::uint64_t rows = grid.band(band).second;
      const std::uint64_t bytes = rows * tensor.row_bytes();
      if (panels == 1 || (rows > 1 && bytes <= kBatchBytesTarget && panels <= kBatchTilesMax)) {
        builder.add(panels, bytes);
        continue;
      }
      for (std::uint64_t panel = 0; panel < panels; ++panel) {
        builder.add(1, rows * (grid.panel_starts[panel + 1] - grid.panel_starts[panel]) * tensor.element_bytes);
      }
    }
  }
  return builder.finish();
}

std::vector<std::uint32_t> batch_elements(const Layout& layout, std::span<const Batch> batches) {
  std::vector<std::uint32_t> elements(batches.size(), 0);
  for (std::size_t b = 0; b < batches.size(); ++b) {
    for_each_strip(layout, batches[b].first, batches[b].end, [&](const Strip& strip) {
      const std::uint64_t cols = strip.panel_starts[strip.panels] - strip.panel_starts[0];
      elements[b] += static_cast<std::uint32_t>(strip.rows * cols);
    });
  }
  return elements;
}

std::uint64_t batch_offset(const Layout& layout, const Batch& batch) {
  const Tile tile = tile_of(layout, batch.first);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  return tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
}

}  // namespace deltasync::delta
