#include "tools/cli/diff_sizes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include "delta/geometry.hpp"
#include "format/tiling.hpp"
#include "tools/cli/delta_check.hpp"

namespace deltasync::tools {
namespace {

constexpr std::int64_t kExactUlp = 4096;

double x_log2_x(double x) {
  return x > 0 ? x * std::log2(x) : 0;
}

/// n·H(c/n) in bits.
double position_bits(std::uint64_t n, std::uint64_t c) {
  if (n == 0 || c == 0 || c == n) return 0;
  const auto a = static_cast<double>(n);
  const auto b = static_cast<double>(c);
  return x_log2_x(a) - x_log2_x(b) - x_log2_x(a - b);
}

/// Counts ulp differences: exact below kExactUlp, by sign and bit length from there on.
class ValueHistogram {
 public:
  void add(std::int64_t difference, std::uint64_t times = 1) {
    const std::uint64_t magnitude =
        difference < 0 ? ~static_cast<std::uint64_t>(difference) + 1 : static_cast<std::uint64_t>(difference);
    if (magnitude < static_cast<std::uint64_t>(kExactUlp)) {
      exact_[static_cast<std::size_t>(difference + kExactUlp)] += times;
      return;
    }
    const auto length = static_cast<std::size_t>(std::bit_width(magnitude));
    long_[length + (difference < 0 ? 65 : 0)] += times;
    low_bits_ += times * (length - 1);
  }

  double bits() const {
    std::uint64_t total = 0;
    double sum = 0;
    auto take = [&](std::uint64_t n) {
      total += n;
      sum += x_log2_x(static_cast<double>(n));
    };
    for (const auto n : exact_) take(n);
    for (const auto n : long_) take(n);
    return x_log2_x(static_cast<double>(total)) - sum + static_cast<double>(low_bits_);
  }

  void merge(const ValueHistogram& other) {
    for (std::size_t i = 0; i < exact_.size(); ++i) exact_[i] += other.exact_[i];
    for (std::size_t i = 0; i < long_.size(); ++i) long_[i] += other.long_[i];
    low_bits_ += other.low_bits_;
  }

 private:
  std::vector<std::uint64_t> exact_ = std::vector<std::uint64_t>(2 * kExactUlp + 1);
  std::array<std::uint64_t, 130> long_{};
  std::uint64_t low_bits_ = 0;
};

/// The monotone integer of a bit pattern, as delta_format.md defines it.
template <class U>
std::make_signed_t<U> ordered(U x, bool is_float) {
  using S = std::make_signed_t<U>;
  if (!is_float) return static_cast<S>(x);
  constexpr U kMagnitude = static_cast<U>(static_cast<U>(~U{0}) >> 1);
  const U mask = static_cast<U>(static_cast<S>(x) >> (sizeof(U) * 8 - 1));
  return static_cast<S>(x ^ (mask & kMagnitude));
}

/// Everything that is summed over tensors.
struct Totals {
  /// By dtype and old exponent, made on demand: few exponents occur.
  std::map<std::pair<Dtype, std::uint32_t>, ValueHistogram> values;
};

/// Scans one tensor. Kept by element width so that the inner loop is plain.
class TensorScan {
 public:
  TensorScan(const Layout& layout, std::uint32_t index, Totals& totals, DiffSizes& out)
      : tensor_(layout.tensors()[index]), layout_(layout), totals_(totals), out_(out) {
    density_.name = tensor_.spec.name;
    density_.dtype = tensor_.spec.dtype;
    density_.elements = tensor_.rows * tensor_.cols;
  }

  void run(const std::byte* before, const std::byte* after) {
    switch (tensor_.element_bytes) {
      case 1: scan<std::uint8_t>(before, after); break;
      case 2: scan<std::uint16_t>(before, after); break;
      case 4: scan<std::uint32_t>(before, after); break;
      default: scan<std::uint64_t>(before, after); break;
    }
    finish();
  }

 private:
  struct ByExponent {
    std::uint64_t elements = 0;
    std::uint64_t changed = 0;
    ValueHistogram* values = nullptr;
  };

  template <class U>
  void scan(const std::byte* before, const std::byte* after) {
    const Dtype dtype = tensor_.spec.dtype;
    const int mantissa = dtype_is_float(dtype) ? delta::mantissa_bits(dtype) : -1;
    exponents_.resize(mantissa < 0 ? 1 : (std::size_t{1} << (sizeof(U) * 8 - 1 - static_cast<std::size_t>(mantissa))));
    for (std::uint64_t i = 0; i < tensor_.tile_count; ++i) {
      const Rect rect = tile_of(layout_, tensor_.first_tile + i).rect;
      std::uint64_t changed = 0;
      for (std::uint64_t row = 0; row < rect.rows; ++row) {
        const std::uint64_t at = ((rect.row + row) * tensor_.cols + rect.col) * sizeof(U);
        changed += scan_row<U>(before + at, after + at, rect.cols, mantissa);
      }
      finish_tile(rect.elements(), changed);
    }
  }

  template <class U>
  std::uint64_t scan_row(const std::byte* before, const std::byte* after, std::uint64_t cols, int mantissa) {
    std::uint64_t changed = 0;
    for (std::uint64_t i = 0; i < cols; ++i) {
      const U old_bits = load<U>(before + i * sizeof(U));
      const U new_bits = load<U>(after + i * sizeof(U));
      constexpr U kMagnitude = static_cast<U>(static_cast<U>(~U{0}) >> 1);
      const std::size_t exponent =
          mantissa < 0 ? 0 : static_cast<std::size_t>(static_cast<U>(old_bits & kMagnitude) >> mantissa);
      ++exponents_[exponent].elements;
      if (old_bits == new_bits) continue;
      ++changed;
      add_change<U>(old_bits, new_bits, exponent, mantissa >= 0);
    }
    return changed;
  }

  template <class U>
  void add_change(U old_bits, U new_bits, std::size_t exponent, bool is_float) {
    using S = std::make_signed_t<U>;
    const auto difference = static_cast<S>(static_cast<U>(static_cast<U>(ordered<U>(new_bits, is_float)) -
                                                          static_cast<U>(ordered<U>(old_bits, is_float))));
    ByExponent& group = exponents_[exponent];
    ++group.changed;
    if (group.values == nullptr) {
      group.values = &totals_.values[{tensor_.spec.dtype, static_cast<std::uint32_t>(exponent)}];
    }
    group.values->add(difference);
    // Written so that the lowest integer, which has no positive twin, is large too.
    const bool small = difference >= -8 && difference <= 8;
    const int magnitude = small ? std::abs(static_cast<int>(difference)) : 9;
    ++out_.by_ulp[magnitude == 1 ? 0 : magnitude == 2 ? 1 : magnitude <= 8 ? 2 : 3];
  }

  void finish_tile(std::uint64_t elements, std::uint64_t changed) {
    ++out_.tiles;
    density_.changed += changed;
    if (changed == 0) return;
    ++out_.tiles_changed;
    out_.tile_bytes += elements * tensor_.element_bytes;
    out_.floor_tile.positions += position_bits(elements, changed);
  }

  void finish() {
    const std::uint64_t value_bits = tensor_.element_bytes * 8;
    const std::uint64_t index_bits = density_.elements > (std::uint64_t{1} << 32) ? 64 : 32;
    out_.elements += density_.elements;
    out_.changed += density_.changed;
    out_.model_bytes += tensor_.bytes;
    out_.coo_bits += density_.changed * (index_bits + value_bits);
    if (density_.changed > 0) out_.bitmap_bits += density_.elements + density_.changed * value_bits;
    for (const ByExponent& group : exponents_) {
      out_.floor_exponent.positions += position_bits(group.elements, group.changed);
    }
    out_.tensors.push_back(std::move(density_));
  }

  const Tensor& tensor_;
  const Layout& layout_;
  Totals& totals_;
  DiffSizes& out_;
  TensorDensity density_;
  std::vector<ByExponent> exponents_;
};

void finish_floors(const Totals& totals, DiffSizes& out) {
  ValueHistogram all;
  for (const auto& [key, histogram] : totals.values) {
    out.floor_exponent.values += histogram.bits();
    all.merge(histogram);
  }
  out.floor_model.positions = position_bits(out.elements, out.changed);
  out.floor_model.values = out.floor_tile.values = all.bits();
}

void add_stats(std::array<delta::CodecStats, delta::kCodecEnd>& to, const delta::Delta& from) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i].tiles += from.stats[i].tiles;
    to[i].changed += from.stats[i].changed;
    to[i].bytes += from.stats[i].bytes;
  }
}

/// Encodes tensors [first, end) of the models as a layout of their own, so that memory stays bounded.
Status encode_group(const Layout& whole, const TensorBytes& before, const TensorBytes& after, std::size_t first,
                    std::size_t end, ThreadPool& pool, DiffSizes& out) {
  const auto tensors = whole.tensors().subspan(first, end - first);
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const Tensor& tensor : tensors) specs.push_back(tensor.spec);
  DS_ASSIGN(const LayoutPtr layout, Layout::build(std::move(specs)));

  std::vector<std::byte> old_half(layout->half_bytes());
  std::vector<std::byte> new_half(layout->half_bytes());
  for (std::uint32_t i = 0; i < layout->tensors().size(); ++i) {
    const Tensor& tensor = layout->tensors()[i];
    if (tensor.bytes == 0) continue;
    const auto index = static_cast<std::uint32_t>(first + i);
    std::memcpy(old_half.data() + tensor.offset, before(index).data(), tensor.bytes);
    std::memcpy(new_half.data() + tensor.offset, after(index).data(), tensor.bytes);
  }
  std::vector<std::uint64_t> base(layout->tile_count());
  delta::half_digests(*layout, old_half, base, pool);
  for (const auto form : {delta::ValueForm::ulp, delta::ValueForm::absolute}) {
    std::vector<std::uint64_t> digests = base;
    delta::EncodeRequest request;
    request.from = {1, 1};
    request.to = {1, 2};
    request.from_root = delta::root_digest(base);
    request.form = form;
    const delta::Delta delta = delta::encode(*layout, old_half, new_half, digests, request, pool);
    const bool ulp = form == delta::ValueForm::ulp;
    (ulp ? out.ulp_bytes : out.absolute_bytes) += delta.frame_bytes;
    add_stats(ulp ? out.ulp_stats : out.absolute_stats, delta);
    if (!ulp) continue;
    DS_ASSIGN(const delta::Delta compact, delta::compact(*layout, delta, old_half, pool));
    DS_TRY(check_delta(*layout, compact, old_half, new_half, base, pool));
    out.compact_bytes += compact.frame_bytes;
    add_stats(out.compact_stats, compact);
  }
  return {};
}

/// layout_mismatch names the first tensor that differs.
Status same_layout(const Layout& before, const Layout& after) {
  if (before.digest() == after.digest()) return {};
  const auto a = before.tensors();
  const auto b = after.tensors();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].spec != b[i].spec) {
      const std::string names = a[i].spec.name == b[i].spec.name
                                    ? a[i].spec.name + " has another shape or dtype"
                                    : a[i].spec.name + " in one, " + b[i].spec.name + " in the other";
      return Error(Errc::layout_mismatch, "tensor " + std::to_string(i) + ": " + names);
    }
  }
  return Error(Errc::layout_mismatch,
               std::to_string(a.size()) + " tensors in one, " + std::to_string(b.size()) + " in the other");
}

/// A model's bytes laid out as a half.
std::vector<std::byte> half_of(const HfModel& model) {
  std::vector<std::byte> half(model.layout()->half_bytes());
  const auto tensors = model.layout()->tensors();
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].bytes == 0) continue;
    std::memcpy(half.data() + tensors[i].offset, model.tensor(i).data(), tensors[i].bytes);
  }
  return half;
}

}  // namespace

namespace {

/// Two models as halves, and the delta between them.
struct ModelDelta {
  std::vector<std::byte> before;
  std::vector<std::byte> after;
  std::vector<std::uint64_t> digests;  ///< of `before`
  delta::Delta delta;
};

Result<ModelDelta> model_delta(const HfModel& before, const HfModel& after, ThreadPool& pool) {
  const Layout& layout = *before.layout();
  DS_TRY(same_layout(layout, *after.layout()));
  ModelDelta out{half_of(before), half_of(after), std::vector<std::uint64_t>(layout.tile_count()), {}};
  delta::half_digests(layout, out.before, out.digests, pool);
  const delta::EncodeRequest request{{1, 1}, {1, 2}, delta::root_digest(out.digests), delta::ValueForm::ulp};
  auto digests = out.digests;
  out.delta = delta::encode(layout, out.before, out.after, digests, request, pool);
  return out;
}

}  // namespace

Result<std::vector<std::byte>> delta_container(const HfModel& before, const HfModel& after, ThreadPool& pool) {
  DS_ASSIGN(const ModelDelta model, model_delta(before, after, pool));
  return delta::to_container(model.delta);
}

Result<CompactSizes> compact_sizes(const Layout& layout, const delta::Delta& delta, ByteSpan before, ByteSpan after,
                                   std::span<const std::uint64_t> digests, ThreadPool& pool) {
  DS_ASSIGN(const delta::Delta compact, delta::compact(layout, delta, before, pool));
  DS_TRY(check_delta(layout, compact, before, after, digests, pool));
  CompactSizes out;
  out.container_bytes = delta::to_container(delta).size();
  out.compact_container_bytes = delta::to_container(compact).size();
  add_stats(out.compact_stats, compact);
  return out;
}

Result<CompactSizes> compact_sizes(const HfModel& before, const HfModel& after, ThreadPool& pool) {
  DS_ASSIGN(const ModelDelta model, model_delta(before, after, pool));
  return compact_sizes(*before.layout(), model.delta, model.before, model.after, model.digests, pool);
}

Result<DiffSizes> diff_sizes(const HfModel& before, const HfModel& after, ThreadPool& pool,
                             const DiffProgress& progress, std::uint64_t group_bytes_max) {
  DS_TRY(same_layout(*before.layout(), *after.layout()));
  return diff_sizes(
      *before.layout(), [&](std::uint32_t i) { return before.tensor(i); },
      [&](std::uint32_t i) { return after.tensor(i); }, pool, progress, group_bytes_max);
}

Result<DiffSizes> diff_sizes(const Layout& layout, const TensorBytes& before, const TensorBytes& after,
                             ThreadPool& pool, const DiffProgress& progress, std::uint64_t group_bytes_max) {
  const auto tensors = layout.tensors();
  DiffSizes out;
  Totals totals;
  std::uint64_t bytes_done = 0;
  for (std::size_t first = 0; first < tensors.size();) {
    std::size_t end = first;
    std::uint64_t bytes = 0;
    while (end < tensors.size() && (end == first || bytes + tensors[end].bytes <= group_bytes_max)) {
      TensorScan(layout, static_cast<std::uint32_t>(end), totals, out)
          .run(before(static_cast<std::uint32_t>(end)).data(), after(static_cast<std::uint32_t>(end)).data());
      bytes += tensors[end].bytes;
      if (progress) progress(bytes_done + bytes);
      ++end;
    }
    DS_TRY(encode_group(layout, before, after, first, end, pool, out));
    bytes_done += bytes;
    first = end;
  }
  finish_floors(totals, out);
  return out;
}

}  // namespace deltasync::tools
