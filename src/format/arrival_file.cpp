#include "format/arrival_file.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "base/hash.hpp"
#include "base/label.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kArrivalMagic = 0x3156495252415344;  // "DSARRIV1"
constexpr std::uint32_t kArrivalVersion = 1;

struct ArrivalHeader {
  std::uint64_t magic = kArrivalMagic;
  std::uint32_t version = kArrivalVersion;
  std::uint32_t flags = 0;  ///< zero
  std::uint64_t body_bytes = 0;
  std::uint64_t body_hash = 0;  ///< XXH3-64
  std::uint64_t header_hash = 0;
};
static_assert(sizeof(ArrivalHeader) == 40 && std::has_unique_object_representations_v<ArrivalHeader>);
static_assert(offsetof(ArrivalHeader, body_bytes) == 16 && offsetof(ArrivalHeader, header_hash) == 32);

std::uint64_t hash_arrival(const ArrivalHeader& header) {
  return xxh3_64(bytes_of(header).first(offsetof(ArrivalHeader, header_hash)));
}

Error bad_arrival(const std::string& what) {
  return {Errc::corrupt, "arriving version: " + what};
}

Digest128 get_digest(ByteReader& in) {
  Digest128 digest;
  const ByteSpan bytes = in.take(sizeof(digest.bytes));
  if (!bytes.empty()) std::memcpy(digest.bytes.data(), bytes.data(), bytes.size());
  return digest;
}

}  // namespace

std::vector<std::byte> encode_arriving(const Layout& layout, const Version& version, const Digest128& root,
                                       std::span<const std::uint64_t> digests) {
  std::vector<std::byte> body;
  ByteWriter out(body);
  out.append(std::as_bytes(std::span(layout.digest().bytes)));
  out.put(version.id.epoch);
  out.put(version.id.number);
  out.put_string(version.label);
  out.append(std::as_bytes(std::span(root.bytes)));
  out.put<std::uint64_t>(digests.size());
  out.append(std::as_bytes(digests));
  ArrivalHeader header;
  header.body_bytes = body.size();
  header.body_hash = xxh3_64(body);
  header.header_hash = hash_arrival(header);
  std::vector<std::byte> file;
  file.reserve(sizeof(header) + body.size());
  ByteWriter writer(file);
  writer.append(bytes_of(header));
  writer.append(body);
  return file;
}

Result<ArrivingVersion> decode_arriving(ByteSpan file, const Layout& layout) {
  if (file.size() < sizeof(ArrivalHeader)) return bad_arrival("truncated header");
  const auto header = load<ArrivalHeader>(file.data());
  if (header.magic != kArrivalMagic) return bad_arrival("wrong magic");
  if (header.header_hash != hash_arrival(header)) return bad_arrival("header hash differs");
  if (header.version != kArrivalVersion) {
    return Error(Errc::unsupported, "arriving version: format version " + std::to_string(header.version));
  }
  if (header.flags != 0) return bad_arrival("reserved fields are not zero");
  const ByteSpan body = file.subspan(sizeof(ArrivalHeader));
  if (header.body_bytes != body.size()) return bad_arrival("it is not as long as it says");
  if (xxh3_64(body) != header.body_hash) return bad_arrival("body hash differs");
  ByteReader in(body);
  if (get_digest(in) != layout.digest()) return Error(Errc::layout_mismatch, "arriving version: of another layout");
  ArrivingVersion read;
  read.version.id.epoch = in.get<std::uint64_t>();
  read.version.id.number = in.get<std::uint64_t>();
  read.version.label = in.get_string(kLabelBytesMax);
  read.root = get_digest(in);
  const auto tiles = in.get<std::uint64_t>();
  if (in.failed() || tiles != layout.tile_count()) return bad_arrival("it does not have a digest for each tile");
  const ByteSpan digests = in.take(tiles * sizeof(std::uint64_t));
  DS_TRY(in.finish("arriving version"));
  if (auto checked = check_label(read.version.label); !checked) return bad_arrival(checked.error().message());
  read.digests.resize(static_cast<std::size_t>(tiles));
  if (!digests.empty()) std::memcpy(read.digests.data(), digests.data(), digests.size());
  return read;
}

}  // namespace deltasync
