// A layout and its sidecar as they cross a wire or a socket: canonical encodings, each in one zstd frame.
#pragma once

#include <vector>

#include "deltasync/hf.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

struct LayoutEncodings {
  std::vector<std::byte> layout;   ///< Layout::encode
  std::vector<std::byte> sidecar;  ///< Sidecar::encode; may be empty
};

/// Fails with out_of_range if an encoding is over kLayoutRawBytesMax, or the result over kLayoutBytesMax.
Result<LayoutMessage> pack_layout(ByteSpan layout_encoded, ByteSpan sidecar_encoded);
/// Decompresses to exactly the sizes that the message names, never beyond them, and never allocates further ahead of
/// the data than one step: a lying size costs nothing. `corrupt` names the part.
Result<LayoutEncodings> unpack_layout(const LayoutMessage& message);

/// Of what came with a layout. No bytes: its trainer brought no side files, and it is make_sidecar()'s.
Result<Sidecar> decode_sidecar(ByteSpan encoded, const Layout& layout);

}  // namespace deltasync::wire
