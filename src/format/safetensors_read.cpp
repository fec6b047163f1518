#include <algorithm>

#include "format/safetensors.hpp"
#include "format/safetensors_events.hpp"

namespace deltasync::safetensors {
namespace {

/// Bytes of the tensor by shape and dtype, bounded before each product.
Result<std::uint64_t> bytes_by_shape(const Entry& e) {
  if (std::find(e.shape.begin(), e.shape.end(), 0u) != e.shape.end()) return std::uint64_t{0};
  std::uint64_t bytes = dtype_bytes(e.dtype);
  for (const auto dim : e.shape) {
    if (dim > kModelBytesMax / bytes) return Error(Errc::corrupt, "tensor '" + e.name + "': too large");
    bytes *= dim;
  }
  const std::uint64_t packed = dtype_packed(e.dtype);
  if ((e.shape.empty() ? 1 : e.shape.back()) % packed != 0) {
    return Error(Errc::corrupt, "tensor '" + e.name + "': its last dimension is no multiple of " +
                                    std::to_string(packed) + ", as " + std::string(to_string(e.dtype)) + " needs");
  }
  return bytes / packed;
}

/// Each range as long as its tensor, and all of them together the data section, in order.
Status check_ranges(const std::vector<Entry>& entries, std::uint64_t data_bytes) {
  std::uint64_t expected = 0;
  for (const auto& e : entries) {
    const auto range = "[" + std::to_string(e.begin) + ", " + std::to_string(e.end) + ")";
    if (e.begin != expected) {
      return Error(Errc::corrupt, "tensor '" + e.name + "': its bytes " + range +
                                      (e.begin < expected ? " overlap" : " leave a hole after") +
                                      " those before, which end at " + std::to_string(expected));
    }
    if (e.end < e.begin || e.end > data_bytes) {
      return Error(Errc::corrupt, "tensor '" + e.name + "': its bytes " + range + " are not in the data section of " +
                                      std::to_string(data_bytes) + " bytes");
    }
    DS_ASSIGN(const auto bytes, bytes_by_shape(e));
    if (e.end - e.begin != bytes) {
      return Error(Errc::corrupt, "tensor '" + e.name + "': " + std::to_string(e.end - e.begin) +
                                      " bytes, but its shape and dtype need " + std::to_string(bytes));
    }
    expected = e.end;
  }
  if (expected != data_bytes) {
    return Error(Errc::corrupt, "the data section has " + std::to_string(data_bytes) + " bytes, the tensors " +
                                    std::to_string(expected));
  }
  return {};
}

Status check_names_unique(const std::vector<Entry>& entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const auto& e : entries) names.push_back(e.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) return Error(Errc::corrupt, "tensor '" + std::string(*twin) + "' is listed twice");
  return {};
}

}  // namespace

Result<std::uint64_t> header_bytes(ByteSpan file, std::uint64_t file_bytes) {
  if (file.size() < kLengthBytes || file_bytes < kLengthBytes) {
    return Error(Errc::corrupt, "shorter than a safetensors header");
  }
  const auto json_bytes = load<std::uint64_t>(file.data());
  if (json_bytes > kJsonBytesMax || json_bytes > file_bytes - kLengthBytes) {
    return Error(Errc::corrupt, "the header claims " + std::to_string(json_bytes) + " bytes of a file of " +
                                    std::to_string(file_bytes));
  }
  return kLengthBytes + json_bytes;
}

Result<std::vector<Entry>> parse_header(ByteSpan header, std::uint64_t data_bytes) {
  DS_ASSIGN(const auto bytes, header_bytes(header, header.size()));
  if (bytes != header.size()) return Error(Errc::corrupt, "the header's length field is wrong");
  const auto* json = reinterpret_cast<const char*>(header.data() + kLengthBytes);
  const auto json_bytes = static_cast<std::size_t>(bytes - kLengthBytes);
  if (json_bytes == 0 || json[0] != '{') return Error(Errc::corrupt, "the header does not begin with '{'");
  HeaderEvents events;
  if (!nlohmann::json::sax_parse(json, json + json_bytes, &events)) return events.error();
  auto entries = std::move(events.entries());
  DS_TRY(check_names_unique(entries));
  // The order in the JSON is free; empty tensors come before what begins where they lie.
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  DS_TRY(check_ranges(entries, data_bytes));
  return entries;
}

}  // namespace deltasync::safetensors
