#include "bench/synth.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kChunkElements = 1u << 20;

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// A unit normal to within the needs of a benchmark: the sum of eight uniform bytes (Irwin–Hall) plus a uniform
/// fraction from a second hash, so that values are spread over all floats and not over 2,041 steps.
float normal(std::uint64_t key) {
  const std::uint64_t a = mix(key);
  const std::uint64_t b = mix(a);
  std::uint32_t sum = 0;
  for (unsigned i = 0; i < 64; i += 8) sum += (a >> i) & 0xFF;
  const float fraction = static_cast<float>(b >> 40) * 0x1p-24F;
  constexpr float kMean = 8 * 127.5F + 0.5F;
  constexpr float kSigma = 209.02F;  // sqrt(8 × (256² − 1) / 12)
  return (static_cast<float>(sum) + fraction - kMean) / kSigma;
}

/// Round to nearest, ties to even. The generator makes no NaN.
std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float moved(float w, float step_size, std::uint64_t key) {
  return w - step_size * normal(key);
}

/// The step size at which `density` of a sample's bf16 copies change.
float calibrate(double density, std::uint64_t seed) {
  constexpr std::uint64_t kSample = 1u << 20;
  float low = 1e-12F;
  float high = 1.0F;
  for (int round = 0; round < 40; ++round) {
    const float middle = std::sqrt(low * high);
    std::uint64_t changed = 0;
    for (std::uint64_t i = 0; i < kSample; ++i) {
      const float w = 0.02F * normal(mix(seed) + i);
      changed += to_bf16(w) != to_bf16(moved(w, middle, mix(seed + 1) + i));
    }
    (static_cast<double>(changed) < density * kSample ? low : high) = middle;
  }
  return high;
}

}  // namespace

Result<LayoutPtr> decoder_layout(std::uint64_t model_bytes, Dtype dtype) {
  constexpr std::uint64_t kHidden = 2048;
  constexpr std::uint64_t kKv = 512;
  constexpr std::uint64_t kFfn = 5632;
  const std::uint64_t elements = std::max<std::uint64_t>(model_bytes, 1u << 20) / dtype_bytes(dtype);
  std::uint64_t used = 0;
  std::vector<TensorSpec> specs;
  const auto add = [&](std::string name, std::vector<std::uint64_t> shape) {
    std::uint64_t n = 1;
    for (const auto d : shape) n *= d;
    used += n;
    specs.push_back({std::move(name), dtype, std::move(shape), {}, {}});
  };
  constexpr std::uint64_t kLayer = 2 * kHidden * kHidden + 2 * kKv * kHidden + 3 * kFfn * kHidden + 2 * kHidden;
  unsigned layer = 0;
  while (used + kLayer <= elements) {
    const std::string p = "model.layers." + std::to_string(layer++) + ".";
    add(p + "input_layernorm.weight", {kHidden});
    add(p + "self_attn.q_proj.weight", {kHidden, kHidden});
    add(p + "self_attn.k_proj.weight", {kKv, kHidden});
    add(p + "self_attn.v_proj.weight", {kKv, kHidden});
    add(p + "self_attn.o_proj.weight", {kHidden, kHidden});
    add(p + "post_attention_layernorm.weight", {kHidden});
    add(p + "mlp.gate_proj.weight", {kFfn, kHidden});
    add(p + "mlp.up_proj.weight", {kFfn, kHidden});
    add(p + "mlp.down_proj.weight", {kHidden, kFfn});
  }
  if (const std::uint64_t rows = (elements - used) / kHidden; rows > 0)
    add("model.embed_tokens.weight", {rows, kHidden});
  return Layout::build(std::move(specs));
}

SyntheticModel::SyntheticModel(LayoutPtr layout, double density, std::uint64_t seed, ThreadPool& pool)
    : layout_(std::move(layout)),
      seed_(seed),
      pool_(pool),
      master_(layout_->elements()),
      step_size_(calibrate(density, seed)) {
  const std::uint64_t base = mix(seed_ + 2);
  pool_.run((master_.size() + kChunkElements - 1) / kChunkElements, [&](std::uint64_t chunk, unsigned) {
    const std::uint64_t end = std::min<std::uint64_t>(master_.size(), (chunk + 1) * kChunkElements);
    for (std::uint64_t i = chunk * kChunkElements; i < end; ++i) master_[i] = 0.02F * normal(base + i);
  });
}

void SyntheticModel::write_half(std::span<std::byte> half) const {
  std::vector<std::uint64_t> first(layout_->tensors().size());
  std::uint64_t at = 0;
  for (std::size_t t = 0; t < first.size(); ++t) {
    first[t] = at;
    at += layout_->tensors()[t].bytes / layout_->tensors()[t].element_bytes;
  }
  pool_.run(first.size(), [&](std::uint64_t t, unsigned) {
    const Tensor& tensor = layout_->tensors()[t];
    const float* in = master_.data() + first[t];
    if (tensor.spec.dtype == Dtype::f32) {
      std::memcpy(half.data() + tensor.offset, in, tensor.bytes);
      return;
    }
    auto* out = reinterpret_cast<std::uint16_t*>(half.data() + tensor.offset);
    for (std::uint64_t i = 0; i < tensor.bytes / 2; ++i) out[i] = to_bf16(in[i]);
  });
}

void SyntheticModel::step() {
  const std::uint64_t base = mix(seed_ + 3 + ++steps_);
  pool_.run((master_.size() + kChunkElements - 1) / kChunkElements, [&](std::uint64_t chunk, unsigned) {
    const std::uint64_t end = std::min<std::uint64_t>(master_.size(), (chunk + 1) * kChunkElements);
    for (std::uint64_t i = chunk * kChunkElements; i < end; ++i) master_[i] = moved(master_[i], step_size_, base + i);
  });
}

}  // namespace deltasync::bench
