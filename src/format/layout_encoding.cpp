// The canonical encoding of a layout, little-endian (docs/layout_format.md "Layout"):
//
//   layout := "DSLAYOUT"  u32 format version  u64 tensors  tensor…
//   tensor := u32 bytes, name   u8 dtype   u8 dimensions, u64 each   u32 row cuts, u64 each   u32 column cuts, u64 each
//
// Offsets, tiles and digests are derived and never stored, so that they cannot lie.
#include "base/bytes.hpp"
#include "base/hash.hpp"
#include "deltasync/layout.hpp"

namespace deltasync {
namespace {

constexpr std::string_view kMagic = "DSLAYOUT";
constexpr std::uint32_t kFormatVersion = 1;
/// Of a tensor with a name of one byte, no dimension and no cut.
constexpr std::size_t kTensorEncodedBytesMin = 4 + 1 + 1 + 1 + 4 + 4;

void put_list(ByteWriter& out, const std::vector<std::uint64_t>& values) {
  out.append(std::as_bytes(std::span(values)));
}

/// `count` numbers; the count is held against what is left before anything is allocated.
std::vector<std::uint64_t> get_list(ByteReader& in, std::uint64_t count) {
  const ByteSpan bytes = in.take(count * sizeof(std::uint64_t));
  std::vector<std::uint64_t> values(bytes.size() / sizeof(std::uint64_t));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::size_t encoded_bytes(const TensorSpec& spec) {
  return 14 + spec.name.size() + 8 * (spec.shape.size() + spec.row_cuts.size() + spec.col_cuts.size());
}

Result<TensorSpec> get_tensor(ByteReader& in, std::uint64_t position) {
  TensorSpec spec;
  spec.name = in.get_string(kTensorNameBytesMax);
  const auto dtype = in.get<std::uint8_t>();
  spec.dtype = static_cast<Dtype>(dtype);
  spec.shape = get_list(in, in.get<std::uint8_t>());
  spec.row_cuts = get_list(in, in.get<std::uint32_t>());
  spec.col_cuts = get_list(in, in.get<std::uint32_t>());
  if (in.failed()) {
    return Error(Errc::corrupt, "layout: tensor " + std::to_string(position) + " is truncated or out of bounds");
  }
  return spec;
}

}  // namespace

std::vector<std::byte> Layout::encode() const {
  std::size_t bytes = kMagic.size() + 4 + 8;
  for (const auto& t : tensors_) bytes += encoded_bytes(t.spec);
  std::vector<std::byte> encoded;
  encoded.reserve(bytes);
  ByteWriter out(encoded);
  out.append(bytes_of(kMagic));
  out.put<std::uint32_t>(kFormatVersion);
  out.put<std::uint64_t>(tensors_.size());
  for (const auto& t : tensors_) {
    out.put_string(t.spec.name);
    out.put<std::uint8_t>(static_cast<std::uint8_t>(t.spec.dtype));
    out.put<std::uint8_t>(static_cast<std::uint8_t>(t.spec.shape.size()));
    put_list(out, t.spec.shape);
    out.put<std::uint32_t>(static_cast<std::uint32_t>(t.spec.row_cuts.size()));
    put_list(out, t.spec.row_cuts);
    out.put<std::uint32_t>(static_cast<std::uint32_t>(t.spec.col_cuts.size()));
    put_list(out, t.spec.col_cuts);
  }
  return encoded;
}

Result<LayoutPtr> Layout::decode(std::span<const std::byte> encoded) {
  ByteReader in(encoded);
  const ByteSpan magic = in.take(kMagic.size());
  if (in.failed() || std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0) {
    return Error(Errc::corrupt, "layout: does not begin with DSLAYOUT");
  }
  const auto version = in.get<std::uint32_t>();
  if (!in.failed() && version != kFormatVersion) {
    return Error(Errc::unsupported, "layout: format version " + std::to_string(version) + ", this build knows " +
                                        std::to_string(kFormatVersion));
  }
  const auto count = in.get<std::uint64_t>();
  if (in.failed() || count > kTensorsMax || count > in.remaining() / kTensorEncodedBytesMin) {
    return Error(Errc::corrupt, "layout: truncated, or " + std::to_string(count) + " tensors in " +
                                    std::to_string(in.remaining()) + " bytes");
  }
  std::vector<TensorSpec> specs;
  specs.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) {
    DS_ASSIGN(auto spec, get_tensor(in, i));
    specs.push_back(std::move(spec));
  }
  DS_TRY(in.finish("layout"));
  auto built = build(std::move(specs));
  if (!built) {
    // The caller passed nothing wrong: the bytes describe something that no writer would have accepted.
    const auto& error = built.error();
    return Error(error.code() == Errc::invalid_argument ? Errc::corrupt : error.code(), "layout: " + error.message());
  }
  if ((*built)->digest() != xxh3_128(encoded)) {
    return Error(Errc::corrupt, "layout: the encoding is not canonical");
  }
  return built;
}

}  // namespace deltasync
