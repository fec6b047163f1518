#include "format/wire_bucket.hpp"

#include "format/wire_codec.hpp"

namespace deltasync::wire {

std::vector<std::byte> BucketHello::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(protocol);
  out.put(rank);
  out.put(ranks);
  out.put(half_bytes);
  out.put_string(cut(name, kPeerNameBytesMax));
  put_ranges(out, tensors);
  put_layout_message(out, layout);
  return bytes;
}
Result<BucketHello> BucketHello::decode(ByteSpan payload) {
  Decoder in(payload, "bucket_hello");
  BucketHello m;
  m.protocol = in.get<std::uint16_t>();
  m.rank = in.get<std::uint32_t>();
  m.ranks = in.get<std::uint32_t>();
  m.half_bytes = in.get<std::uint64_t>();
  m.name = in.string(kPeerNameBytesMax, "name");
  if (auto ranges = get_ranges(in.in()); ranges.ok()) {
    m.tensors = *std::move(ranges);
  } else {
    in.reject("tensors", "not a sorted list of disjoint ranges");
  }
  m.layout = get_layout_message(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> BucketBegin::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_version(out, version);
  return bytes;
}
Result<BucketBegin> BucketBegin::decode(ByteSpan payload) {
  Decoder in(payload, "bucket_begin");
  BucketBegin m;
  m.version = in.version();
  return in.finish(std::move(m));
}

std::vector<std::byte> BucketHeld::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter(bytes).put(epoch);
  return bytes;
}
Result<BucketHeld> BucketHeld::decode(ByteSpan payload) {
  Decoder in(payload, "bucket_held");
  BucketHeld m;
  m.epoch = in.get<std::uint64_t>();
  return in.finish(m);
}

std::vector<std::byte> BucketChunk::encode() const {
  std::vector<std::byte> bytes;
  bytes.reserve(16 + 4 * parts.size() + 8 * digests.size());
  ByteWriter out(bytes);
  out.put(half);
  out.put_varint(parts.size());
  for (const BucketPart& part : parts) {
    out.put_varint(std::uint64_t{part.tensor} << 1 | (part.bands != 0 ? 1 : 0));
    if (part.bands == 0) continue;
    out.put_varint(part.first_band);
    out.put_varint(part.bands);
  }
  out.put_varint(digests.size());
  out.append({reinterpret_cast<const std::byte*>(digests.data()), digests.size() * sizeof(std::uint64_t)});
  return bytes;
}
Result<BucketChunk> BucketChunk::decode(ByteSpan payload) {
  Decoder in(payload, "bucket_chunk");
  BucketChunk m;
  m.half = in.get_at_most<std::uint8_t>(1, "half");
  const std::uint64_t parts = in.varint();
  if (parts > in.in().remaining()) in.reject("part count", std::to_string(parts) + ", more than there are");
  if (!in.in().failed()) m.parts.reserve(static_cast<std::size_t>(parts));
  for (std::uint64_t i = 0; i < parts && !in.in().failed(); ++i) {
    BucketPart part;
    const std::uint64_t tensor = in.varint();
    if (tensor >> 1 >= kTensorsMax) in.reject("tensor", std::to_string(tensor >> 1));
    part.tensor = static_cast<std::uint32_t>(tensor >> 1);
    if ((tensor & 1) != 0) {
      part.first_band = in.varint();
      part.bands = in.varint();
      if (part.bands == 0) in.reject("bands", "0");
    }
    m.parts.push_back(part);
  }
  const std::uint64_t digests = in.varint();
  if (digests > in.in().remaining() / sizeof(std::uint64_t)) {
    in.reject("digest count", std::to_string(digests) + ", more than there are");
  }
  if (!in.in().failed()) {
    m.digests.resize(static_cast<std::size_t>(digests));
    const ByteSpan from = in.in().take(digests * sizeof(std::uint64_t));
    if (!from.empty()) std::memcpy(m.digests.data(), from.data(), from.size());
  }
  return in.finish(std::move(m));
}

std::vector<std::byte> BucketFinish::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(tensors);
  out.put(model_bytes);
  put_digest(out, root);
  return bytes;
}
Result<BucketFinish> BucketFinish::decode(ByteSpan payload) {
  Decoder in(payload, "bucket_finish");
  BucketFinish m;
  m.tensors = in.get<std::uint64_t>();
  m.model_bytes = in.get<std::uint64_t>();
  m.root = in.digest();
  return in.finish(m);
}

}  // namespace deltasync::wire
