// <name>.json: what a version's directory holds. Written when the directory is whole, read when a receiver starts.
#pragma once

#include <string>
#include <string_view>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

struct HfRecord {
  Version version;
  Digest128 layout;
  Digest128 root;   ///< of the state digests of all tiles
  Digest128 files;  ///< of the sidecar's encoding: file split, headers, side files
};

inline constexpr std::size_t kHfRecordBytesMax = 64u << 10;

/// JSON with a final newline. A label that is no UTF-8 keeps its place, its bad bytes replaced.
std::string encode_record(const HfRecord& record);
/// corrupt, naming the field.
Result<HfRecord> decode_record(std::string_view text);

}  // namespace deltasync
