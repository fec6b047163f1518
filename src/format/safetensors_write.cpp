#include <nlohmann/json.hpp>

#include "format/safetensors.hpp"

namespace deltasync::safetensors {
namespace {

/// As transformers writes it; some loaders refuse files without.
constexpr std::string_view kMetadata = R"({"__metadata__":{"format":"pt"})";
constexpr std::size_t kDataAlignment = 8;

}  // namespace

std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump();
}

HeaderBuilder::HeaderBuilder() : json_(kMetadata) {}

bool HeaderBuilder::add(const Tensor& tensor) {
  std::string entry = "," + json_string(tensor.spec.name) + R"(:{"dtype":")";
  entry += to_string(tensor.spec.dtype);
  entry += R"(","shape":[)";
  for (std::size_t i = 0; i < tensor.spec.shape.size(); ++i) {
    if (i != 0) entry += ',';
    entry += std::to_string(tensor.spec.shape[i]);
  }
  entry +=
      R"(],"data_offsets":[)" + std::to_string(data_bytes_) + "," + std::to_string(data_bytes_ + tensor.bytes) + "]}";
  if (json_.size() + entry.size() + kDataAlignment > kJsonBytesMax) return false;
  json_ += entry;
  data_bytes_ += tensor.bytes;
  return true;
}

std::vector<std::byte> HeaderBuilder::finish() {
  json_ += '}';
  json_.resize((json_.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment, ' ');
  std::vector<std::byte> header;
  ByteWriter out(header);
  out.put<std::uint64_t>(json_.size());
  out.append(bytes_of(std::string_view(json_)));
  return header;
}

}  // namespace deltasync::safetensors
