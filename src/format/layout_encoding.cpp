// The canonical encoding of a layout, little-endian (layout_format.md "Layout"):
//
//   layout := "DSLAYOUT"  u32 format version  u64 tensors  tensor…
//   tensor := u32 bytes, name   u8 dtype   u8 dimensions, u64 each   u32 row cuts, u64 each   u32 column cuts, u64 each
//
// Offsets, tiles and digests are derived and never stored, so that they cannot lie.
#include <algorithm>
#include <utility>

#include "base/bytes.hpp"
#include "base/hash.hpp"
#include "format/layout_decoder.hpp"
#include "format/layout_index.hpp"

namespace deltasync {
namespace {

constexpr std::string_view kMagic = "DSLAYOUT";
constexpr std::uint32_t kFormatVersion = 1;
/// Of a tensor with a name of one byte, no dimension and no cut.
constexpr std::size_t kTensorEncodedBytesMin = 4 + 1 + 1 + 1 + 4 + 4;

void put_list(ByteWriter& out, const std::vector<std::uint64_t>& values) {
  out.append(std::as_bytes(std::span(values)));
}

/// Whatever is left of a list that is not all there fails the reader; nothing is allocated for it.
std::vector<std::uint64_t> get_list(ByteReader& in, std::uint64_t count) {
  const ByteSpan bytes = in.take(count * sizeof(std::uint64_t));
  std::vector<std::uint64_t> values(bytes.size() / sizeof(std::uint64_t));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::size_t encoded_bytes(const TensorSpec& spec) {
  return 14 + spec.name.size() + 8 * (spec.shape.size() + spec.row_cuts.size() + spec.col_cuts.size());
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

// ---- decoding ------------------------------------------------------------------------------------------------------

namespace {

/// What is wrong is the bytes: the caller passed no argument that could be.
Error as_corrupt(const Error& error) {
  return {error.code() == Errc::invalid_argument ? Errc::corrupt : error.code(), "layout: " + error.message()};
}

}  // namespace

Status LayoutDecoder::read_head(ByteReader& in) {
  const ByteSpan magic = in.take(kMagic.size());
  if (in.failed()) return {};
  if (std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0) {
    return Error(Errc::corrupt, "layout: does not begin with DSLAYOUT");
  }
  const auto version = in.get<std::uint32_t>();
  if (!in.failed() && version != kFormatVersion) {
    return Error(Errc::unsupported, "layout: format version " + std::to_string(version) + ", this build knows " +
                                        std::to_string(kFormatVersion));
  }
  const auto tensors = in.get<std::uint64_t>();
  if (in.failed()) return {};
  const std::uint64_t left = encoded_bytes_ - std::min<std::uint64_t>(encoded_bytes_, in.position());
  if (tensors > kTensorsMax || tensors > left / kTensorEncodedBytesMin) {
    return Error(Errc::corrupt,
                 "layout: " + std::to_string(tensors) + " tensors in " + std::to_string(left) + " bytes");
  }
  tensors_ = tensors;
  return {};
}

Result<bool> LayoutDecoder::read_tensor(ByteReader& in) {
  const auto refuse = [this](const char* what, std::uint64_t count) {
    return Error(Errc::corrupt, "layout: tensor " + std::to_string(read_.size()) +
                                    " is out of bounds: " + std::to_string(count) + " " + what);
  };
  Tensor tensor;
  TensorSpec& spec = tensor.spec;
  const auto name_bytes = in.get<std::uint32_t>();
  if (name_bytes > kTensorNameBytesMax) return refuse("bytes of name", name_bytes);
  const ByteSpan name = in.take(name_bytes);
  spec.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  spec.dtype = static_cast<Dtype>(in.get<std::uint8_t>());
  const auto dims = in.get<std::uint8_t>();
  if (dims > kTensorDimsMax) return refuse("dimensions", dims);
  spec.shape = get_list(in, dims);
  for (auto* cuts : {&spec.row_cuts, &spec.col_cuts}) {
    const auto count = in.get<std::uint32_t>();
    if (count > kTensorCutsMax) return refuse("cuts", count);
    *cuts = get_list(in, count);
  }
  if (in.failed()) return false;
  if (auto checked = derive(tensor, read_.size()); !checked) return as_corrupt(checked.error());
  read_.push_back(std::move(tensor));
  return true;
}

Status LayoutDecoder::feed(ByteSpan so_far) {
  if (!tensors_) {
    ByteReader in(so_far);
    DS_TRY(read_head(in));
    if (!tensors_) return {};
    at_ = in.position();
  }
  while (read_.size() < *tensors_) {
    ByteReader in(so_far.subspan(at_));
    DS_ASSIGN(const bool whole, read_tensor(in));
    if (!whole) return {};
    at_ += in.position();
  }
  if (so_far.size() == at_) return {};
  return Error(Errc::corrupt,
               "layout: too many bytes, " + std::to_string(so_far.size() - at_) + " or more after its last tensor");
}

Result<LayoutPtr> LayoutDecoder::finish(ByteSpan encoded) {
  if (!tensors_ || read_.size() < *tensors_) {
    return Error(Errc::corrupt, "layout: is truncated in " +
                                    (tensors_ ? "tensor " + std::to_string(read_.size()) : std::string("its head")));
  }
  read_.shrink_to_fit();
  auto built = Layout::make(std::move(read_));
  if (!built) return as_corrupt(built.error());
  if ((*built)->digest() != xxh3_128(encoded)) {
    return Error(Errc::corrupt, "layout: the encoding is not canonical");
  }
  return built;
}

Result<LayoutPtr> Layout::decode(std::span<const std::byte> encoded) {
  LayoutDecoder decoder(encoded.size());
  DS_TRY(decoder.feed(encoded));
  return decoder.finish(encoded);
}

}  // namespace deltasync
