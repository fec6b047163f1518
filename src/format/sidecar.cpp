// The encoding of a sidecar, little-endian (layout_format.md "Sidecar"):
//
//   sidecar := "DSSIDCAR"  u32 format version  u32 weight files  u32 other files  weight…  other…
//   weight  := name  u64 bytes, header  u32 tensors, u32 layout index each
//   other   := name  u64 bytes, contents            name := u32 bytes, text
//
// That of a part is "DSSIDCAR"  u32 format version 2, and Sidecar::part.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/file_name.hpp"
#include "format/hf_files.hpp"
#include "format/part.hpp"
#include "format/safetensors.hpp"
#include "format/sidecar_decoder.hpp"

namespace deltasync {
namespace {

constexpr std::string_view kSidecarMagic = "DSSIDCAR";
constexpr std::uint32_t kSidecarFormat = 1;
constexpr std::uint32_t kPartFormat = 2;
/// Of a file with a name of one byte and nothing in it.
constexpr std::size_t kFileEncodedBytesMin = 4 + 1 + 8;

Status check_names(const Sidecar& sidecar) {
  std::vector<std::string_view> names;
  for (const auto& f : sidecar.weights) names.push_back(f.name);
  for (const auto& f : sidecar.others) names.push_back(f.name);
  return check_file_names(names);
}

/// Marks the file's tensors in `seen`; none may be marked already.
Status check_indices(const Sidecar::File& file, const Layout& layout, std::vector<bool>& seen) {
  for (const auto index : file.tensors) {
    if (index >= layout.tensors().size()) {
      return Error(Errc::corrupt,
                   "tensor index " + std::to_string(index) + " of " + std::to_string(layout.tensors().size()));
    }
    if (seen[index]) return Error(Errc::corrupt, "tensor '" + layout.tensors()[index].spec.name + "' occurs twice");
    seen[index] = true;
  }
  return {};
}

/// The header must describe exactly the tensors that follow it, or the file written from it would be broken.
Status check_header(const Sidecar::File& file, const Layout& layout) {
  if (safetensors::is_built_header(file.bytes, layout, file.tensors)) return {};  // as nearly all are
  std::uint64_t data_bytes = 0;
  for (const auto index : file.tensors) data_bytes += layout.tensors()[index].bytes;
  DS_ASSIGN(const auto entries, safetensors::parse_header(file.bytes, data_bytes));
  if (entries.size() != file.tensors.size()) {
    return Error(Errc::corrupt, "its header lists " + std::to_string(entries.size()) + " tensors, the sidecar " +
                                    std::to_string(file.tensors.size()));
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const TensorSpec& spec = layout.tensors()[file.tensors[i]].spec;
    if (entries[i].name != spec.name || entries[i].dtype != spec.dtype || entries[i].shape != spec.shape) {
      return Error(Errc::corrupt, "its header describes tensor '" + entries[i].name +
                                      "' where the layout has another shape, dtype or tensor ('" + spec.name + "')");
    }
  }
  return {};
}

}  // namespace

std::vector<std::byte> Sidecar::encode() const {
  std::vector<std::byte> encoded;
  ByteWriter out(encoded);
  out.append(bytes_of(kSidecarMagic));
  if (!part.empty()) {
    out.put<std::uint32_t>(kPartFormat);
    out.append(part);
    return encoded;
  }
  out.put<std::uint32_t>(kSidecarFormat);
  out.put<std::uint32_t>(static_cast<std::uint32_t>(weights.size()));
  out.put<std::uint32_t>(static_cast<std::uint32_t>(others.size()));
  for (const auto& f : weights) {
    out.put_string(f.name);
    out.put<std::uint64_t>(f.bytes.size());
    out.append(f.bytes);
    out.put<std::uint32_t>(static_cast<std::uint32_t>(f.tensors.size()));
    out.append(std::as_bytes(std::span(f.tensors)));
  }
  for (const auto& f : others) {
    out.put_string(f.name);
    out.put<std::uint64_t>(f.bytes.size());
    out.append(f.bytes);
  }
  return encoded;
}

// ---- decoding ------------------------------------------------------------------------------------------------------

namespace {

Error bad_sidecar(const std::string& what) {
  return {Errc::corrupt, "sidecar: " + what};
}

/// Nothing: it is not all there. A name that no file may have is refused at once.
Result<std::optional<std::string>> get_name(ByteReader& in) {
  const auto bytes = in.get<std::uint32_t>();
  if (bytes > kFileNameBytesMax) return bad_sidecar("a file name of " + std::to_string(bytes) + " bytes");
  const ByteSpan name = in.take(bytes);
  if (in.failed()) return std::optional<std::string>();
  std::string text(reinterpret_cast<const char*>(name.data()), name.size());
  if (auto checked = check_file_name(text); !checked) return bad_sidecar(checked.error().message());
  return std::optional<std::string>(std::move(text));
}

}  // namespace

Status SidecarDecoder::read_head(ByteReader& in) {
  const ByteSpan magic = in.take(kSidecarMagic.size());
  if (in.failed()) return {};
  if (std::memcmp(magic.data(), kSidecarMagic.data(), kSidecarMagic.size()) != 0)
    return bad_sidecar("does not begin with DSSIDCAR");
  const auto version = in.get<std::uint32_t>();
  if (!in.failed() && version == kPartFormat && of_part_) {
    has_head_ = has_part_ = true;
    return {};
  }
  if (!in.failed() && version != kSidecarFormat) {
    return Error(Errc::unsupported, "sidecar: format version " + std::to_string(version) + ", this build knows " +
                                        std::to_string(kSidecarFormat) +
                                        (of_part_ ? " and " + std::to_string(kPartFormat) : std::string()));
  }
  weights_ = in.get<std::uint32_t>();
  others_ = in.get<std::uint32_t>();
  if (in.failed()) return {};
  const std::uint64_t left = encoded_bytes_ - std::min<std::uint64_t>(encoded_bytes_, in.position());
  if (weights_ + others_ > left / kFileEncodedBytesMin) return bad_sidecar("truncated, or more files than bytes");
  has_head_ = true;
  return {};
}

Result<bool> SidecarDecoder::read_weight_file(ByteReader& in) {
  DS_ASSIGN(auto name, get_name(in));
  if (!name) return false;
  const auto context = "sidecar: file '" + *name + "'";
  const auto header_bytes = in.get<std::uint64_t>();
  if (header_bytes > safetensors::kLengthBytes + safetensors::kJsonBytesMax) {
    return Error(Errc::corrupt, context + ": a header of " + std::to_string(header_bytes) + " bytes");
  }
  const ByteSpan header = in.take(header_bytes);
  const auto tensors = in.get<std::uint32_t>();
  if (tensors > layout_.tensors().size()) {
    return Error(Errc::corrupt, context + ": " + std::to_string(tensors) + " tensors, the layout has " +
                                    std::to_string(layout_.tensors().size()));
  }
  const ByteSpan indices = in.take(std::uint64_t{tensors} * sizeof(std::uint32_t));
  if (in.failed()) return false;
  Sidecar::File file{*std::move(name), {header.begin(), header.end()}, std::vector<std::uint32_t>(tensors)};
  if (!indices.empty()) std::memcpy(file.tensors.data(), indices.data(), indices.size());
  DS_TRY(check_indices(file, layout_, seen_).with_context(context));
  DS_TRY(check_header(file, layout_).with_context(context));
  sidecar_.weights.push_back(std::move(file));
  return true;
}

Result<bool> SidecarDecoder::read_other_file(ByteReader& in) {
  DS_ASSIGN(auto name, get_name(in));
  if (!name) return false;
  const ByteSpan bytes = in.take(in.get<std::uint64_t>());
  if (in.failed()) return false;
  sidecar_.others.push_back({*std::move(name), {bytes.begin(), bytes.end()}});
  return true;
}

/// It is looked at when all of it is there.
Status SidecarDecoder::read_part(ByteSpan so_far) {
  if (so_far.size() > encoded_bytes_) return bad_sidecar("too many bytes");
  if (so_far.size() < encoded_bytes_) return {};
  const ByteSpan part = so_far.subspan(at_);
  DS_TRY(decode_part(part, layout_));
  sidecar_.part.assign(part.begin(), part.end());
  return {};
}

Status SidecarDecoder::feed(ByteSpan so_far) {
  if (!has_head_) {
    ByteReader in(so_far);
    DS_TRY(read_head(in));
    if (!has_head_) return {};
    at_ = in.position();
  }
  if (has_part_) return read_part(so_far);
  while (sidecar_.weights.size() < weights_ || sidecar_.others.size() < others_) {
    ByteReader in(so_far.subspan(at_));
    DS_ASSIGN(const bool whole, sidecar_.weights.size() < weights_ ? read_weight_file(in) : read_other_file(in));
    if (!whole) return {};
    at_ += in.position();
  }
  if (so_far.size() == at_) return {};
  return bad_sidecar("too many bytes, " + std::to_string(so_far.size() - at_) + " or more after its last file");
}

Result<Sidecar> SidecarDecoder::finish() {
  if (has_part_ && sidecar_.part.empty()) return bad_sidecar("is truncated");
  if (!has_head_ || sidecar_.weights.size() < weights_ || sidecar_.others.size() < others_) {
    return bad_sidecar("is truncated");
  }
  if (auto names = check_names(sidecar_); !names) return bad_sidecar(names.error().message());
  return std::move(sidecar_);
}

Result<Sidecar> Sidecar::decode(std::span<const std::byte> encoded, const Layout& layout) {
  SidecarDecoder decoder(layout, encoded.size());
  DS_TRY(decoder.feed(encoded));
  return decoder.finish();
}

Result<std::vector<HfPlace>> hf_places(const Layout& layout, const Sidecar& sidecar) {
  std::vector<HfPlace> places(layout.tensors().size());
  std::vector<bool> seen(layout.tensors().size());
  for (std::uint32_t f = 0; f < sidecar.weights.size(); ++f) {
    const auto& file = sidecar.weights[f];
    DS_TRY(check_indices(file, layout, seen).with_context("sidecar: file '" + file.name + "'"));
    std::uint64_t offset = file.bytes.size();
    for (const auto index : file.tensors) {
      places[index] = {f, offset};
      offset += layout.tensors()[index].bytes;
    }
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (!seen[i]) {
      return Error(Errc::corrupt, "sidecar: no file holds tensor '" + layout.tensors()[i].spec.name + "'");
    }
  }
  return places;
}

}  // namespace deltasync
