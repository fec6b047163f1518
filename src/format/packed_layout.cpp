#include "format/packed_layout.hpp"

#include <zstd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "format/layout_decoder.hpp"
#include "format/sidecar_decoder.hpp"

namespace deltasync::wire {
namespace {

constexpr int kLevel = 1;  ///< names and shapes repeat so much that higher levels only cost time
/// Bytes that are decompressed before they are looked at: few at first, then as many again as have been found good.
constexpr std::size_t kStepMin = 64u << 10;
constexpr std::size_t kStepMax = 4u << 20;

Result<std::vector<std::byte>> compress(ByteSpan raw, const char* what) {
  if (raw.size() > kLayoutRawBytesMax) {
    return Error(Errc::out_of_range, std::string(what) + " has " + std::to_string(raw.size()) +
                                         " bytes; the limit is " + std::to_string(kLayoutRawBytesMax));
  }
  std::vector<std::byte> out(::ZSTD_compressBound(raw.size()));
  const std::size_t n = ::ZSTD_compress(out.data(), out.size(), raw.data(), raw.size(), kLevel);
  if (::ZSTD_isError(n) != 0) {
    return Error(Errc::internal, std::string("compressing the ") + what + ": " + ::ZSTD_getErrorName(n));
  }
  if (raw.size() > plausible_raw_bytes(n)) {
    return Error(Errc::out_of_range, std::string(what) + ": its " + std::to_string(raw.size()) + " bytes compress to " +
                                         std::to_string(n) +
                                         ", so few that no receiver would believe it: are there files of one byte "
                                         "repeated, or cuts for thousands of ranks?");
  }
  out.resize(n);
  return out;
}

struct FreeContext {
  void operator()(ZSTD_DCtx* context) const { ::ZSTD_freeDCtx(context); }
};

/// Decompresses to exactly `raw_bytes`. The decoder is fed what has come so far, step by step.
template <class Decoder>
Result<std::vector<std::byte>> decompress(ByteSpan packed, std::uint64_t raw_bytes, const char* what,
                                          Decoder& decoder) {
  const auto corrupt = [what](const std::string& why) { return Error(Errc::corrupt, std::string(what) + ": " + why); };
  if (raw_bytes > kLayoutRawBytesMax) return corrupt("claims " + std::to_string(raw_bytes) + " bytes, over the limit");
  if (raw_bytes > plausible_raw_bytes(packed.size())) {
    return corrupt("claims " + std::to_string(raw_bytes) + " bytes in " + std::to_string(packed.size()) +
                   " packed ones, more than there can be");
  }
  const std::unique_ptr<ZSTD_DCtx, FreeContext> context(::ZSTD_createDCtx());
  if (context == nullptr) return Error(Errc::internal, std::string(what) + ": no memory for a zstd context");
  std::vector<std::byte> out;
  ZSTD_inBuffer in{packed.data(), packed.size(), 0};
  for (;;) {
    const std::size_t at = out.size();
    out.resize(at + std::min<std::uint64_t>(raw_bytes - at, std::clamp(at, kStepMin, kStepMax)));
    ZSTD_outBuffer to{out.data() + at, out.size() - at, 0};
    const std::size_t rc = ::ZSTD_decompressStream(context.get(), &to, &in);
    if (::ZSTD_isError(rc) != 0) return corrupt(::ZSTD_getErrorName(rc));
    out.resize(at + to.pos);
    DS_TRY(decoder.feed(out));
    if (rc == 0) break;
    if (to.pos == 0 && out.size() == raw_bytes) return corrupt("is longer than the size it claims");
    if (to.pos == 0 && in.pos == in.size) return corrupt("is truncated");
  }
  if (out.size() != raw_bytes) return corrupt("is shorter than the size it claims");
  if (in.pos != in.size) return corrupt("has bytes after its zstd frame");
  return out;
}

/// No bytes are no sidecar; that there are none is seen by decompressing them, too.
struct NoDecoder {
  Status feed(ByteSpan) { return {}; }
};

}  // namespace

Result<LayoutMessage> pack_layout(ByteSpan layout_encoded, ByteSpan sidecar_encoded) {
  LayoutMessage message;
  message.layout_raw_bytes = layout_encoded.size();
  message.sidecar_raw_bytes = sidecar_encoded.size();
  DS_ASSIGN(message.layout_zstd, compress(layout_encoded, "layout"));
  DS_ASSIGN(message.sidecar_zstd, compress(sidecar_encoded, "sidecar"));
  const std::uint64_t bytes = message.layout_zstd.size() + message.sidecar_zstd.size() + kControlBytesMax;
  if (bytes > kLayoutBytesMax) {
    return Error(Errc::out_of_range, "layout and sidecar compress to " + std::to_string(bytes) +
                                         " bytes; the limit is " + std::to_string(kLayoutBytesMax));
  }
  return message;
}

Result<UnpackedLayout> unpack_layout(const LayoutMessage& message) {
  UnpackedLayout out;
  LayoutDecoder layout(message.layout_raw_bytes);
  DS_ASSIGN(out.layout_encoded, decompress(message.layout_zstd, message.layout_raw_bytes, "layout", layout));
  DS_ASSIGN(out.layout, layout.finish(out.layout_encoded));
  if (message.sidecar_raw_bytes == 0) {
    NoDecoder none;
    DS_ASSIGN(out.sidecar_encoded, decompress(message.sidecar_zstd, 0, "sidecar", none));
    return out;
  }
  SidecarDecoder sidecar(*out.layout, message.sidecar_raw_bytes);
  DS_ASSIGN(out.sidecar_encoded, decompress(message.sidecar_zstd, message.sidecar_raw_bytes, "sidecar", sidecar));
  DS_ASSIGN(out.sidecar, sidecar.finish());
  return out;
}

Sidecar take_sidecar(UnpackedLayout&& unpacked) {
  return unpacked.sidecar ? *std::move(unpacked.sidecar) : make_sidecar(*unpacked.layout);
}

}  // namespace deltasync::wire
