#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "format/safetensors.hpp"

namespace deltasync::safetensors {
namespace {

/// As transformers writes it; some loaders refuse files without.
constexpr std::string_view kMetadata = R"({"__metadata__":{"format":"pt"})";
constexpr std::size_t kDataAlignment = 8;

void put_string(std::string& out, std::string_view text) {
  const bool plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c < '\x7F' && c != '"' && c != '\\'; });
  if (plain) {
    out += '"';
    out += text;
    out += '"';
  } else {
    out += nlohmann::json(text).dump();
  }
}

void put_number(std::string& out, std::uint64_t number) {
  char digits[20];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

/// What the header says of a tensor whose bytes begin there.
void put_entry(std::string& out, const Tensor& tensor, std::uint64_t begin) {
  out += ',';
  put_string(out, tensor.spec.name);
  out += R"(:{"dtype":")";
  out += to_string(tensor.spec.dtype);
  out += R"(","shape":[)";
  for (std::size_t i = 0; i < tensor.spec.shape.size(); ++i) {
    if (i != 0) out += ',';
    put_number(out, tensor.spec.shape[i]);
  }
  out += R"(],"data_offsets":[)";
  put_number(out, begin);
  out += ',';
  put_number(out, begin + tensor.bytes);
  out += "]}";
}

}  // namespace

std::string json_string(std::string_view text) {
  std::string literal;
  put_string(literal, text);
  return literal;
}

HeaderBuilder::HeaderBuilder() : json_(kMetadata) {}

bool HeaderBuilder::add(const Tensor& tensor) {
  std::string entry;
  put_entry(entry, tensor, data_bytes_);
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

bool is_built_header(ByteSpan header, const Layout& layout, std::span<const std::uint32_t> order) {
  if (header.size() < kLengthBytes || load<std::uint64_t>(header.data()) != header.size() - kLengthBytes) return false;
  std::string_view rest(reinterpret_cast<const char*>(header.data()) + kLengthBytes, header.size() - kLengthBytes);
  const auto take = [&rest](std::string_view text) {
    if (!rest.starts_with(text)) return false;
    rest.remove_prefix(text.size());
    return true;
  };
  if (rest.size() > kJsonBytesMax || !take(kMetadata)) return false;
  std::uint64_t data_bytes = 0;
  std::string entry;
  for (const std::uint32_t index : order) {
    const Tensor& tensor = layout.tensors()[index];
    entry.clear();
    put_entry(entry, tensor, data_bytes);
    if (!take(entry)) return false;
    data_bytes += tensor.bytes;
  }
  return take("}") && rest.find_first_not_of(' ') == std::string_view::npos;
}

}  // namespace deltasync::safetensors
