// A layout and its sidecar as they cross a wire or a socket: canonical encodings, each in one zstd frame.
#pragma once

#include <optional>
#include <vector>

#include "deltasync/layout.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

/// How many bytes an encoding of `packed_bytes` compressed ones may have: 64 MiB, and 1,024 more for each packed byte.
/// zstd alone would let 64 KiB become 2 GiB. The densest layouts that occur (90,000 tensors of regular names, cut for
/// 256 ranks) have 700 bytes for each packed one; those that are denser are far below 64 MiB.
constexpr std::uint64_t plausible_raw_bytes(std::uint64_t packed_bytes) {
  return (64u << 20) + 1024 * packed_bytes;
}

/// Fails with out_of_range if an encoding is over kLayoutRawBytesMax or denser than plausible_raw_bytes(), or the
/// result over kLayoutBytesMax.
Result<LayoutMessage> pack_layout(ByteSpan layout_encoded, ByteSpan sidecar_encoded);

struct UnpackedLayout {
  LayoutPtr layout;
  std::optional<Sidecar> sidecar;          ///< nothing: its trainer brought none
  std::vector<std::byte> layout_encoded;   ///< Layout::encode
  std::vector<std::byte> sidecar_encoded;  ///< Sidecar::encode, or no bytes
};
/// Decompresses and decodes side by side, the layout first. A part that is denser than plausible is not begun; one that
/// no encoder writes ends at the first tensor or file that shows it. So what is held at any time is what a layout of so
/// many bytes takes, and a lying size costs nothing. `corrupt` or `unsupported`; the message begins with the part.
Result<UnpackedLayout> unpack_layout(const LayoutMessage& message);

/// Of what came with a layout, or make_sidecar()'s if none came.
Sidecar take_sidecar(UnpackedLayout&& unpacked);

}  // namespace deltasync::wire
