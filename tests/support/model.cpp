#include "tests/support/model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numbers>

namespace deltasync::test {

std::uint64_t Random::next() noexcept {
  std::uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

std::vector<TensorSpec> sample_specs() {
  std::vector<TensorSpec> specs;
  const auto add = [&](std::string name, Dtype dtype, std::vector<std::uint64_t> shape) -> TensorSpec& {
    TensorSpec spec;
    spec.name = std::move(name);
    spec.dtype = dtype;
    spec.shape = std::move(shape);
    specs.push_back(std::move(spec));
    return specs.back();
  };
  add("embed.weight", Dtype::bf16, {700, 96}).row_cuts = {100, 350};  // more than one band in each part
  add("norm.scale", Dtype::f32, {96});
  add("step", Dtype::i64, {});
  add("empty.rows", Dtype::bf16, {0, 96});
  add("odd.mask", Dtype::boolean, {7, 3});  // 21 bytes: what follows in a file is unaligned
  add("attn.q", Dtype::bf16, {96, 96}).col_cuts = {24, 48, 72};
  add("router.bias", Dtype::f64, {5});
  add("wide.row", Dtype::f8_e4m3, {2, 140000});  // more than two panels of one row
  add("fp16.cube", Dtype::f16, {3, 5, 7});
  add("fp8.other", Dtype::f8_e5m2, {33, 17});
  add("count.i32", Dtype::i32, {11, 13});
  add("count.i16", Dtype::i16, {1, 29});
  add("quant.i8", Dtype::i8, {257, 3});
  add("quant.u8", Dtype::u8, {1});
  add("empty.cols", Dtype::f32, {4, 0});
  add("ids.u16", Dtype::u16, {19});
  add("ids.u32", Dtype::u32, {2, 2, 2});
  add("ids.u64", Dtype::u64, {3});
  TensorSpec& ffn = add("ffn.down", Dtype::bf16, {300, 1184});
  ffn.col_cuts = {592};
  ffn.row_cuts = {150};
  return specs;
}

namespace {

/// Near N(0, 0.02): the sum of four uniforms has variance 1/3. They are the quarters of one random word (weights are
/// made in nearly all tests); a second one fills what such a sum leaves of a mantissa.
float weight(Random& random) {
  const std::uint64_t word = random.next();
  double sum = random.uniform() * 0x1p-16 - 2;
  for (unsigned quarter = 0; quarter < 64; quarter += 16)
    sum += static_cast<double>(word >> quarter & 0xFFFF) * 0x1p-16;
  return static_cast<float>(sum * std::numbers::sqrt3 * 0.02);
}

/// Bits of a weight in a float dtype by truncation (what matters here is the spread of exponents, not the rounding).
std::uint64_t weight_bits(Dtype dtype, Random& random) {
  const float value = weight(random);
  const auto bits = std::bit_cast<std::uint32_t>(value);
  switch (dtype) {
    case Dtype::f64: return std::bit_cast<std::uint64_t>(static_cast<double>(value));
    case Dtype::f32: return bits;
    case Dtype::bf16: return bits >> 16;
    default: return random.next();  // the short formats: any pattern is a plausible weight
  }
}

unsigned mantissa_bits_of(Dtype dtype) {
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

void put_element(std::byte* to, std::uint64_t bits, std::size_t width) {
  std::memcpy(to, &bits, width);
}

std::uint64_t get_element(const std::byte* from, std::size_t width) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, from, width);
  return bits;
}

}  // namespace

TestModel make_model(std::uint64_t seed, std::vector<TensorSpec> specs) {
  auto layout = Layout::build(std::move(specs));
  if (!layout) {
    std::fprintf(stderr, "make_model: %s\n", layout.error().to_string().c_str());
    std::abort();
  }
  TestModel model{*layout, std::vector<std::byte>((*layout)->half_bytes())};
  Random random(seed);
  std::size_t index = 0;
  for (const Tensor& tensor : model.layout->tensors()) {
    const bool arbitrary = !dtype_is_float(tensor.spec.dtype) || index++ % 4 == 3;
    std::byte* to = model.half.data() + tensor.offset;
    for (std::uint64_t i = 0; i < tensor.bytes; i += tensor.element_bytes) {
      put_element(to + i, arbitrary ? random.next() : weight_bits(tensor.spec.dtype, random), tensor.element_bytes);
    }
  }
  return model;
}

std::uint64_t mutate(std::vector<std::byte>& half, const Layout& layout, double density, std::uint64_t seed) {
  Random random(seed);
  std::uint64_t changed = 0;
  for (const Tensor& tensor : layout.tensors()) {
    std::byte* const first = half.data() + tensor.offset;
    const std::size_t width = tensor.element_bytes;
    for (std::uint64_t i = 0; i < tensor.bytes; i += width) {
      if (random.uniform() >= density) continue;
      const std::uint64_t before = get_element(first + i, width);
      const std::uint64_t ulps = 1 + std::countr_zero(random.next() | (1u << 20));
      std::uint64_t after = random.below(2) != 0 ? before + ulps : before - ulps;
      if (random.below(64) == 0) after = random.next();
      put_element(first + i, after, width);
      if (get_element(first + i, width) != before) ++changed;
    }
  }
  return changed;
}

void step_small(std::vector<std::byte>& half, const Layout& layout, double density, std::uint64_t seed) {
  Random random(seed);
  for (const Tensor& tensor : layout.tensors()) {
    std::byte* const first = half.data() + tensor.offset;
    const std::size_t width = tensor.element_bytes;
    const unsigned mantissa = mantissa_bits_of(tensor.spec.dtype);
    const double usual = std::ldexp(1, static_cast<int>(width * 8 - 2 - mantissa)) - 7;  // the exponent of 0.02
    for (std::uint64_t i = 0; i < tensor.bytes; i += width) {
      const std::uint64_t before = get_element(first + i, width);
      const std::uint64_t magnitude = before & ((std::uint64_t{1} << (width * 8 - 1)) - 1);
      const double above = static_cast<double>(magnitude >> mantissa) - usual;
      const double likely =
          dtype_is_float(tensor.spec.dtype) ? std::min(0.25, density * std::exp2(-2 * above)) : density;
      if (random.uniform() >= likely) continue;
      put_element(first + i, random.below(2) != 0 ? before + 1 : before - 1, width);
    }
  }
}

}  // namespace deltasync::test
