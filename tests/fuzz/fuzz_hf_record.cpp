// The record of a version's directory. What decodes encodes to a record of the same version and digests.
#include <cstdlib>
#include <string_view>

#include "receiver/targets/directory/hf_record.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const auto record = decode_record({reinterpret_cast<const char*>(data), size});
  if (!record) return 0;
  const auto again = decode_record(encode_record(*record));
  if (!again || again->version != record->version || again->layout != record->layout || again->root != record->root ||
      again->files != record->files) {
    std::abort();
  }
  return 0;
}
