// Chains of deltas for the tests of merge().
#pragma once

#include <string>
#include <vector>

#include "delta_test_util.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta::test {

/// Versions of one model and the deltas between them.
struct History {
  LayoutPtr layout;
  std::vector<std::vector<std::byte>> halves;
  std::vector<Delta> deltas;

  explicit History(const TestModel& model) : layout(model.layout), halves{model.half} {}
  void push(std::vector<std::byte> half, ValueForm form = ValueForm::ulp) {
    Delta delta = encode_between(*layout, halves.back(), half, form);
    delta.from.number = halves.size();
    delta.to.number = halves.size() + 1;
    deltas.push_back(std::move(delta));
    halves.push_back(std::move(half));
  }
  std::vector<const Delta*> chain() const {
    std::vector<const Delta*> out;
    for (const Delta& delta : deltas) out.push_back(&delta);
    return out;
  }
  /// The delta that an agent with both halves would make.
  Delta direct(ValueForm form = ValueForm::ulp) const {
    Delta delta = encode_between(*layout, halves.front(), halves.back(), form);
    delta.from = deltas.front().from;
    delta.to = deltas.back().to;
    return delta;
  }
  std::uint64_t chain_bytes() const {
    std::uint64_t bytes = 0;
    for (const Delta& delta : deltas) bytes += delta.frame_bytes;
    return bytes;
  }
  MergeOptions with_target() const {
    MergeOptions options;
    options.read_target = [this](std::span<const std::uint64_t> tiles, std::byte* out) {
      for (const std::uint64_t index : tiles) out = copy_tile(index, out);
      return true;
    };
    return options;
  }
  std::byte* copy_tile(std::uint64_t index, std::byte* out) const {
    const Tile tile = tile_of(*layout, index);
    const Tensor& tensor = layout->tensors()[tile.tensor];
    const std::size_t row_bytes = tile.rect.cols * tensor.element_bytes;
    for (std::uint64_t r = 0; r < tile.rect.rows; ++r, out += row_bytes) {
      const std::byte* const row = halves.back().data() + tensor.offset + (tile.rect.row + r) * tensor.row_bytes() +
                                   tile.rect.col * tensor.element_bytes;
      std::memcpy(out, row, row_bytes);
    }
    return out;
  }
};

inline Result<std::optional<Delta>> merge_history(const History& history, const MergeOptions& options = {},
                                                  unsigned threads = 1) {
  ThreadPool pool(threads, "test");
  return merge(*history.layout, history.chain(), options, pool);
}

inline std::vector<TensorSpec> one_of_each_dtype() {
  std::vector<TensorSpec> specs;
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::i64,
                            Dtype::i32, Dtype::i16, Dtype::i8, Dtype::u8, Dtype::boolean}) {
    specs.push_back({std::string(to_string(dtype)), dtype, {300, 500}, {130}, {260}});
  }
  return specs;
}

/// Moves about `density` of the elements by one in the space of bit patterns: rice_ulp is the smallest everywhere.
inline std::vector<std::byte> step_gently(std::vector<std::byte> half, const Layout& layout, double density,
                                          std::uint64_t seed) {
  Random random(seed);
  for (const Tensor& tensor : layout.tensors()) {
    const std::size_t width = tensor.element_bytes;
    for (std::uint64_t at = tensor.offset; at < tensor.offset + tensor.bytes; at += width) {
      if (random.uniform() >= density) continue;
      std::uint64_t bits = 0;
      std::memcpy(&bits, &half[at], width);
      bits += random.below(2) != 0 ? 1 : ~std::uint64_t{0};
      std::memcpy(&half[at], &bits, width);
    }
  }
  return half;
}

}  // namespace deltasync::delta::test
