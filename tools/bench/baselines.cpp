#include "bench/baselines.hpp"

#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace deltasync::bench {
namespace {

Error broken() {
  return Error(Errc::corrupt, "a baseline's delta does not decode");
}

// ---- parts -------------------------------------------------------------------------------------------------------

/// Positions of the elements that differ, ascending.
std::vector<std::uint32_t> changed_positions(Bf16Span before, Bf16Span after) {
  constexpr std::size_t kStep = 32;  // elements that one look compares
  std::vector<std::uint32_t> positions;
  positions.reserve(before.size() / 32);
  for (std::size_t i = 0; i < before.size(); i += kStep) {
    const std::size_t n = std::min(kStep, before.size() - i);
    if (std::memcmp(&before[i], &after[i], n * sizeof(std::uint16_t)) == 0) continue;
    for (std::size_t j = i; j < i + n; ++j) {
      if (before[j] != after[j]) positions.push_back(static_cast<std::uint32_t>(j));
    }
  }
  return positions;
}

template <class T>
void append(std::vector<std::byte>& out, const T* data, std::size_t count) {
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  out.insert(out.end(), first, first + count * sizeof(T));
}

/// u64 count, then the elements.
template <class T>
void append_plane(std::vector<std::byte>& out, const std::vector<T>& plane) {
  const std::uint64_t count = plane.size();
  append(out, &count, 1);
  append(out, plane.data(), plane.size());
}

/// u64 original bytes, u64 compressed bytes, a zstd frame of level 1.
Status append_zstd(std::vector<std::byte>& out, ByteSpan plane) {
  const std::size_t head = out.size();
  const std::size_t bound = ZSTD_compressBound(plane.size());
  out.resize(head + 16 + bound);
  const std::size_t n = ZSTD_compress(out.data() + head + 16, bound, plane.data(), plane.size(), 1);
  if (ZSTD_isError(n) != 0) return Error(Errc::internal, std::string("zstd: ") + ZSTD_getErrorName(n));
  const std::uint64_t sizes[2] = {plane.size(), n};
  std::memcpy(out.data() + head, sizes, sizeof sizes);
  out.resize(head + 16 + n);
  return {};
}
template <class T>
Status append_zstd(std::vector<std::byte>& out, const std::vector<T>& plane) {
  return append_zstd(out, std::as_bytes(std::span(plane)));
}

/// Reads what the functions above append.
class Planes {
 public:
  explicit Planes(ByteSpan bytes) : bytes_(bytes) {}

  template <class T>
  Result<std::vector<T>> plain() {
    DS_ASSIGN(const std::uint64_t count, number());
    if (count > bytes_.size() / sizeof(T)) return broken();
    std::vector<T> plane(count);
    if (count != 0) std::memcpy(plane.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    return plane;
  }
  template <class T>
  Result<std::vector<T>> zstd(std::size_t elements_max) {
    DS_ASSIGN(const std::uint64_t size, number());
    DS_ASSIGN(const std::uint64_t packed, number());
    if (packed > bytes_.size() || size % sizeof(T) != 0 || size / sizeof(T) > elements_max) return broken();
    std::vector<T> plane(size / sizeof(T));
    if (ZSTD_decompress(plane.data(), size, bytes_.data(), packed) != size) return broken();
    bytes_ = bytes_.subspan(packed);
    return plane;
  }

 private:
  Result<std::uint64_t> number() {
    std::uint64_t value = 0;
    if (bytes_.size() < sizeof value) return broken();
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return value;
  }

  ByteSpan bytes_;
};

/// Distances between positions in the narrow type, those that do not fit as `escape` and in a plane of their own.
template <class Narrow, class Wide>
struct Gaps {
  static constexpr Narrow kEscape = static_cast<Narrow>(~Narrow{0});
  std::vector<Narrow> narrow;
  std::vector<Wide> wide;

  explicit Gaps(const std::vector<std::uint32_t>& positions) {
    narrow.reserve(positions.size());
    std::uint32_t last = 0;
    for (const std::uint32_t position : positions) {
      const std::uint32_t gap = position - last;
      last = position;
      narrow.push_back(gap < kEscape ? static_cast<Narrow>(gap) : kEscape);
      if (gap >= kEscape) wide.push_back(static_cast<Wide>(gap));
    }
  }
};

/// Calls at(position, i) for the i-th gap.
template <class Narrow, class Wide, class F>
Status walk_gaps(const std::vector<Narrow>& narrow, const std::vector<Wide>& wide, std::size_t elements, const F& at) {
  std::size_t position = 0;
  std::size_t w = 0;
  for (std::size_t i = 0; i < narrow.size(); ++i) {
    if (narrow[i] != Gaps<Narrow, Wide>::kEscape) {
      position += narrow[i];
    } else {
      if (w == wide.size()) return broken();
      position += wide[w++];
    }
    if (position >= elements) return broken();
    at(position, i);
  }
  return {};
}

// ---- formats -----------------------------------------------------------------------------------------------------

Status encode_coo(Bf16Span before, Bf16Span after, std::vector<std::byte>& out) {
  const auto positions = changed_positions(before, after);
  append_plane(out, positions);
  std::vector<std::uint16_t> values;
  values.reserve(positions.size());
  for (const std::uint32_t p : positions) values.push_back(after[p]);
  append_plane(out, values);
  return {};
}
Status decode_coo(ByteSpan bytes, std::span<std::uint16_t> live) {
  Planes planes(bytes);
  DS_ASSIGN(const auto positions, planes.plain<std::uint32_t>());
  DS_ASSIGN(const auto values, planes.plain<std::uint16_t>());
  if (positions.size() != values.size()) return broken();
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= live.size()) return broken();
    live[positions[i]] = values[i];
  }
  return {};
}

enum class Values : std::uint8_t { raw, xor_with_old };

/// Gaps (those too wide for the narrow type as u32) and values, a zstd frame each.
template <class Narrow, Values kValues>
Status encode_gaps(Bf16Span before, Bf16Span after, std::vector<std::byte>& out) {
  const auto positions = changed_positions(before, after);
  const Gaps<Narrow, std::uint32_t> gaps(positions);
  std::vector<std::uint16_t> values;
  values.reserve(positions.size());
  for (const std::uint32_t p : positions) {
    values.push_back(kValues == Values::raw ? after[p] : static_cast<std::uint16_t>(before[p] ^ after[p]));
  }
  DS_TRY(append_zstd(out, gaps.narrow));
  DS_TRY(append_zstd(out, gaps.wide));
  return append_zstd(out, values);
}
template <class Narrow, Values kValues>
Status decode_gaps(ByteSpan bytes, std::span<std::uint16_t> live) {
  Planes planes(bytes);
  DS_ASSIGN(const auto narrow, planes.zstd<Narrow>(live.size()));
  DS_ASSIGN(const auto wide, planes.zstd<std::uint32_t>(live.size()));
  DS_ASSIGN(const auto values, planes.zstd<std::uint16_t>(live.size()));
  if (values.size() != narrow.size()) return broken();
  return walk_gaps(narrow, wide, live.size(), [&](std::size_t p, std::size_t i) {
    live[p] = kValues == Values::raw ? values[i] : static_cast<std::uint16_t>(live[p] ^ values[i]);
  });
}

Status encode_dense_xor(Bf16Span before, Bf16Span after, std::vector<std::byte>& out) {
  std::vector<std::uint16_t> difference(before.size());
  for (std::size_t i = 0; i < before.size(); ++i) difference[i] = static_cast<std::uint16_t>(before[i] ^ after[i]);
  return append_zstd(out, difference);
}
Status decode_dense_xor(ByteSpan bytes, std::span<std::uint16_t> live) {
  Planes planes(bytes);
  DS_ASSIGN(const auto difference, planes.zstd<std::uint16_t>(live.size()));
  if (difference.size() != live.size()) return broken();
  for (std::size_t i = 0; i < live.size(); ++i) live[i] ^= difference[i];
  return {};
}

constexpr BaselineFormat kFormats[] = {
    {"COO, u32 position + u16 value", "AstraFlow", encode_coo, decode_coo},
    {"sorted COO, u8 gaps + raw values, zstd-1", "PULSE", encode_gaps<std::uint8_t, Values::raw>,
     decode_gaps<std::uint8_t, Values::raw>},
    {"u16 gaps + XOR, zstd-1", "NeMo-RL", encode_gaps<std::uint16_t, Values::xor_with_old>,
     decode_gaps<std::uint16_t, Values::xor_with_old>},
    {"dense XOR, zstd-1", "slime", encode_dense_xor, decode_dense_xor},
};

}  // namespace

std::span<const BaselineFormat> baseline_formats() {
  return kFormats;
}

}  // namespace deltasync::bench
