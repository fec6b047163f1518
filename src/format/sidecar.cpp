// The encoding of a sidecar, little-endian (docs/layout_format.md "Sidecar"):
//
//   sidecar := "DSSIDCAR"  u32 format version  u32 weight files  u32 other files  weight…  other…
//   weight  := name  u64 bytes, header  u32 tensors, u32 layout index each
//   other   := name  u64 bytes, contents            name := u32 bytes, text
#include "base/bytes.hpp"
#include "deltasync/hf.hpp"
#include "format/file_name.hpp"
#include "format/safetensors.hpp"

namespace deltasync {
namespace {

constexpr std::string_view kMagic = "DSSIDCAR";
constexpr std::uint32_t kFormatVersion = 1;
/// Of a file with a name of one byte and nothing in it.
constexpr std::size_t kFileEncodedBytesMin = 4 + 1 + 8;

std::vector<std::byte> get_blob(ByteReader& in) {
  const ByteSpan bytes = in.take(in.get<std::uint64_t>());
  return {bytes.begin(), bytes.end()};
}

Sidecar::WeightFile get_weight_file(ByteReader& in) {
  Sidecar::WeightFile file;
  file.name = in.get_string(kFileNameBytesMax);
  file.header = get_blob(in);
  const ByteSpan indices = in.take(std::uint64_t{in.get<std::uint32_t>()} * sizeof(std::uint32_t));
  file.tensors.resize(indices.size() / sizeof(std::uint32_t));
  if (!indices.empty()) std::memcpy(file.tensors.data(), indices.data(), indices.size());
  return file;
}

Status check_names(const Sidecar& sidecar) {
  std::vector<std::string_view> names;
  for (const auto& f : sidecar.weights) names.push_back(f.name);
  for (const auto& f : sidecar.others) names.push_back(f.name);
  return check_file_names(names);
}

/// Marks the file's tensors in `seen`; none may be marked already.
Status check_indices(const Sidecar::WeightFile& file, const Layout& layout, std::vector<bool>& seen) {
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
Status check_header(const Sidecar::WeightFile& file, const Layout& layout) {
  std::uint64_t data_bytes = 0;
  for (const auto index : file.tensors) data_bytes += layout.tensors()[index].bytes;
  DS_ASSIGN(const auto entries, safetensors::parse_header(file.header, data_bytes));
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
  out.append(bytes_of(kMagic));
  out.put<std::uint32_t>(kFormatVersion);
  out.put<std::uint32_t>(static_cast<std::uint32_t>(weights.size()));
  out.put<std::uint32_t>(static_cast<std::uint32_t>(others.size()));
  for (const auto& f : weights) {
    out.put_string(f.name);
    out.put<std::uint64_t>(f.header.size());
    out.append(f.header);
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

Result<Sidecar> Sidecar::decode(std::span<const std::byte> encoded, const Layout& layout) {
  ByteReader in(encoded);
  const ByteSpan magic = in.take(kMagic.size());
  if (in.failed() || std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0) {
    return Error(Errc::corrupt, "sidecar: does not begin with DSSIDCAR");
  }
  const auto version = in.get<std::uint32_t>();
  if (!in.failed() && version != kFormatVersion) {
    return Error(Errc::unsupported, "sidecar: format version " + std::to_string(version) + ", this build knows " +
                                        std::to_string(kFormatVersion));
  }
  const std::uint64_t weights = in.get<std::uint32_t>();
  const std::uint64_t others = in.get<std::uint32_t>();
  if (in.failed() || weights + others > in.remaining() / kFileEncodedBytesMin) {
    return Error(Errc::corrupt, "sidecar: truncated, or more files than bytes");
  }
  Sidecar sidecar;
  for (std::uint64_t i = 0; i < weights && !in.failed(); ++i) sidecar.weights.push_back(get_weight_file(in));
  for (std::uint64_t i = 0; i < others && !in.failed(); ++i) {
    auto name = in.get_string(kFileNameBytesMax);
    sidecar.others.push_back({std::move(name), get_blob(in)});
  }
  DS_TRY(in.finish("sidecar"));

  if (auto names = check_names(sidecar); !names) return Error(Errc::corrupt, "sidecar: " + names.error().message());
  std::vector<bool> seen(layout.tensors().size());
  for (const auto& file : sidecar.weights) {
    const auto context = "sidecar: file '" + file.name + "'";
    DS_TRY(check_indices(file, layout, seen).with_context(context));
    DS_TRY(check_header(file, layout).with_context(context));
  }
  return sidecar;
}

Result<std::vector<HfPlace>> hf_places(const Layout& layout, const Sidecar& sidecar) {
  std::vector<HfPlace> places(layout.tensors().size());
  std::vector<bool> seen(layout.tensors().size());
  for (std::uint32_t f = 0; f < sidecar.weights.size(); ++f) {
    const auto& file = sidecar.weights[f];
    DS_TRY(check_indices(file, layout, seen).with_context("sidecar: file '" + file.name + "'"));
    std::uint64_t offset = file.header.size();
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
