#include "chaos_model.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace deltasync::chaos {
namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::vector<TensorSpec> specs(std::uint64_t variant) {
  const std::uint64_t part = variant == kSmallVariant ? 16 : 1;  // of the rows
  std::vector<TensorSpec> list;
  list.push_back({"model.embed_tokens.weight", Dtype::bf16, {(1024 + 96 * variant) / part, 256}, {}, {}});
  for (int layer = 0; layer < 4; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    list.push_back({prefix + "mlp.up_proj.weight", Dtype::bf16, {512 / part, 300}, {}, {}});
    list.push_back({prefix + "input_layernorm.weight", Dtype::f32, {300}, {}, {}});
  }
  list.push_back({"model.gate.weight", Dtype::f32, {704 / part, 128}, {}, {}});
  list.push_back({"model.codes", Dtype::u8, {336 / part, 257}, {}, {}});
  list.push_back({"lm_head.weight", Dtype::f8_e4m3, {256 / part, 256}, {}, {}});
  return list;
}

}  // namespace

LayoutPtr make_layout(std::uint64_t variant) {
  auto layout = Layout::build(specs(variant));
  if (variant >= kVariants || !layout) {
    std::fprintf(stderr, "chaos: no layout of variant %llu\n", static_cast<unsigned long long>(variant));
    std::abort();
  }
  return *std::move(layout);
}

std::uint64_t element_bits(std::uint32_t tensor, std::uint64_t element, std::uint64_t number) {
  const std::uint64_t name = std::uint64_t{tensor} << 40 | element;
  const std::uint64_t step = number / kVariants;
  const std::uint64_t age = (step + mix(name) % kPeriod) / kPeriod;
  return mix(name ^ mix(age * kVariants + number % kVariants));
}

std::vector<std::byte> make_rows(const Tensor& tensor, std::uint32_t index, std::uint64_t number, std::uint64_t first,
                                 std::uint64_t end) {
  const std::uint64_t width = tensor.element_bytes;
  std::vector<std::byte> bytes(static_cast<std::size_t>((end - first) * tensor.row_bytes()));
  std::byte* at = bytes.data();
  for (std::uint64_t e = first * tensor.cols; e < end * tensor.cols; ++e, at += width) {
    const std::uint64_t bits = element_bits(index, e, number);
    std::memcpy(at, &bits, width);  // little-endian, as the project is
  }
  return bytes;
}

std::uint64_t find_wrong(const Tensor& tensor, std::uint32_t index, std::uint64_t number, const Look& look,
                         std::size_t found_max, std::vector<Wrong>& found) {
  const std::uint64_t width = tensor.element_bytes;
  const std::uint64_t mask = width == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * width)) - 1;
  std::uint64_t count = 0;
  for (std::uint64_t row = 0; row < tensor.rows; ++row) {
    for (std::uint64_t col = 0; col < tensor.cols; ++col) {
      const std::uint64_t e = row * tensor.cols + col;
      std::uint64_t is = 0;
      std::memcpy(&is, look.base + row * look.row_stride + col * look.col_stride, width);
      const std::uint64_t should_be = element_bits(index, e, number) & mask;
      if (is == should_be) continue;
      if (found.size() < found_max) found.push_back({index, e, is, should_be});
      ++count;
    }
  }
  return count;
}

}  // namespace deltasync::chaos
