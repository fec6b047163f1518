// The header of a safetensors file: an 8-byte length, then JSON that names every tensor with dtype, shape and byte
// range in the data section behind it. Parsing trusts nothing; the exact header bytes are kept by callers that need to
// write the file again (deltasync::Sidecar).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"

namespace deltasync::safetensors {

/// Longest JSON that is read or written, as in the safetensors library itself.
inline constexpr std::uint64_t kJsonBytesMax = 100'000'000;
/// The little-endian u64 before the JSON.
inline constexpr std::size_t kLengthBytes = 8;
/// The key of the header's free-form part: no tensor can have this name.
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct Entry {
  std::string name;
  Dtype dtype = Dtype::bf16;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0;  ///< bytes from the start of the data section
  std::uint64_t end = 0;
};

/// Size of the whole header, length field included: where the data section begins. `file` may be any prefix of the
/// file of at least 8 bytes; `file_bytes` is the size of all of it. corrupt if the length cannot be true.
Result<std::uint64_t> header_bytes(ByteSpan file, std::uint64_t file_bytes);

/// Parses a whole header (length field and JSON). The entries come in file order, and their ranges have been found to
/// follow each other without hole or overlap from 0 to `data_bytes`, each as long as its shape and dtype say.
/// Errors name the tensor: corrupt, unsupported (a dtype that this build does not know).
Result<std::vector<Entry>> parse_header(ByteSpan header, std::uint64_t data_bytes);

/// Writes headers for tensors one after the other.
class HeaderBuilder {
 public:
  HeaderBuilder();
  /// Appends a tensor whose bytes follow those of the one before. False, and nothing is added, if the header would grow
  /// beyond kJsonBytesMax.
  [[nodiscard]] bool add(const Tensor& tensor);
  /// Length field and JSON, padded with spaces so that the data section begins at a multiple of 8 bytes.
  std::vector<std::byte> finish();

 private:
  std::string json_;
  std::uint64_t data_bytes_ = 0;
};

/// Whether a whole header says of these tensors of a layout, in this order, what a HeaderBuilder says, in the same
/// words: then parse_header() would find them, and need not be asked. No tensor twice. False proves nothing.
bool is_built_header(ByteSpan header, const Layout& layout, std::span<const std::uint32_t> order);

/// A JSON string literal, quotes included, of valid UTF-8.
std::string json_string(std::string_view text);

}  // namespace deltasync::safetensors
