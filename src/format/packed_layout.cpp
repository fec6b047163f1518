#include "format/packed_layout.hpp"

#include <zstd.h>

#include <algorithm>
#include <memory>

namespace deltasync::wire {
namespace {

constexpr int kLevel = 1;  ///< names and shapes repeat so much that higher levels only cost time
constexpr std::size_t kGrowthStep = 4u << 20;

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
  out.resize(n);
  return out;
}

struct FreeContext {
  void operator()(ZSTD_DCtx* context) const { ::ZSTD_freeDCtx(context); }
};

Result<std::vector<std::byte>> decompress(ByteSpan packed, std::uint64_t raw_bytes, const char* what) {
  const auto corrupt = [what](const std::string& why) { return Error(Errc::corrupt, std::string(what) + ": " + why); };
  if (raw_bytes > kLayoutRawBytesMax) return corrupt("claims " + std::to_string(raw_bytes) + " bytes, over the limit");
  const std::unique_ptr<ZSTD_DCtx, FreeContext> context(::ZSTD_createDCtx());
  if (context == nullptr) return Error(Errc::internal, std::string(what) + ": no memory for a zstd context");
  std::vector<std::byte> out;
  ZSTD_inBuffer in{packed.data(), packed.size(), 0};
  for (;;) {
    const std::size_t at = out.size();
    out.resize(at + static_cast<std::size_t>(std::min<std::uint64_t>(raw_bytes - at, kGrowthStep)));
    ZSTD_outBuffer to{out.data() + at, out.size() - at, 0};
    const std::size_t rc = ::ZSTD_decompressStream(context.get(), &to, &in);
    if (::ZSTD_isError(rc) != 0) return corrupt(::ZSTD_getErrorName(rc));
    out.resize(at + to.pos);
    if (rc == 0) break;
    if (to.pos == 0 && out.size() == raw_bytes) return corrupt("is longer than the size it claims");
    if (to.pos == 0 && in.pos == in.size) return corrupt("is truncated");
  }
  if (out.size() != raw_bytes) return corrupt("is shorter than the size it claims");
  if (in.pos != in.size) return corrupt("has bytes after its zstd frame");
  return out;
}

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

Result<LayoutEncodings> unpack_layout(const LayoutMessage& message) {
  LayoutEncodings out;
  DS_ASSIGN(out.layout, decompress(message.layout_zstd, message.layout_raw_bytes, "layout"));
  DS_ASSIGN(out.sidecar, decompress(message.sidecar_zstd, message.sidecar_raw_bytes, "sidecar"));
  return out;
}

Result<Sidecar> decode_sidecar(ByteSpan encoded, const Layout& layout) {
  if (encoded.empty()) return make_sidecar(layout);
  return Sidecar::decode(encoded, layout);
}

}  // namespace deltasync::wire
