#include "delta/kept_delta.hpp"

#include <string>
#include <utility>

#include "base/hash.hpp"
#include "base/label.hpp"
#include "delta/container.hpp"

namespace deltasync::delta {
namespace {

constexpr std::uint64_t kKeptMagic = 0x31445450454B5344;  // "DSKEPTD1"
constexpr std::uint32_t kKeptVersion = 1;

struct KeptHeader {
  std::uint64_t magic = kKeptMagic;
  std::uint32_t version = kKeptVersion;
  std::uint32_t flags = 0;  ///< zero
  std::uint64_t list_bytes = 0;
  std::uint64_t list_hash = 0;  ///< XXH3-64
  std::uint64_t reserved = 0;   ///< zero
  std::uint64_t header_hash = 0;
};
static_assert(sizeof(KeptHeader) == 48 && std::has_unique_object_representations_v<KeptHeader>);
static_assert(offsetof(KeptHeader, list_bytes) == 16 && offsetof(KeptHeader, header_hash) == 40);

std::uint64_t hash_kept(const KeptHeader& header) {
  return xxh3_64(bytes_of(header).first(offsetof(KeptHeader, header_hash)));
}

Error bad_kept(const std::string& what) {
  return {Errc::corrupt, "kept delta: " + what};
}

/// The labels and the digests before.
Status read_list(ByteSpan list, const Layout& layout, KeptDelta& entry) {
  ByteReader in(list);
  entry.from.label = in.get_string(kLabelBytesMax);
  entry.to.label = in.get_string(kLabelBytesMax);
  const auto tiles = in.get<std::uint64_t>();
  if (in.failed() || tiles != in.remaining() / sizeof(DigestBefore))
    return bad_kept("its list is not as long as it says");
  entry.before.reserve(static_cast<std::size_t>(tiles));
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < tiles; ++i) {
    const auto tile = in.get<std::uint64_t>();
    if (tile < next || tile >= layout.tile_count())
      return bad_kept("tile " + std::to_string(tile) + " is out of order");
    entry.before.push_back({tile, in.get<std::uint64_t>()});
    next = tile + 1;
  }
  DS_TRY(in.finish("kept delta"));
  for (const auto* label : {&entry.from.label, &entry.to.label}) {
    if (auto checked = check_label(*label); !checked) return bad_kept(checked.error().message());
  }
  return {};
}

}  // namespace

std::vector<std::byte> kept_delta_head(const Delta& delta, const Version& from, const Version& to,
                                       std::span<const DigestBefore> before) {
  std::vector<std::byte> list;
  ByteWriter out(list);
  out.put_string(from.label);
  out.put_string(to.label);
  out.put<std::uint64_t>(before.size());
  for (const DigestBefore& one : before) {
    out.put(one.tile);
    out.put(one.digest);
  }
  KeptHeader header;
  header.list_bytes = list.size();
  header.list_hash = xxh3_64(list);
  header.header_hash = hash_kept(header);
  std::vector<std::byte> head;
  ByteWriter writer(head);
  writer.append(bytes_of(header));
  writer.append(list);
  writer.append(container_header(delta));
  return head;
}

Result<KeptDelta> decode_kept_delta(ByteSpan file, const Layout& layout) {
  if (file.size() < sizeof(KeptHeader)) return bad_kept("truncated header");
  const auto header = load<KeptHeader>(file.data());
  if (header.magic != kKeptMagic) return bad_kept("wrong magic");
  if (header.header_hash != hash_kept(header)) return bad_kept("header hash differs");
  if (header.version != kKeptVersion) {
    return Error(Errc::unsupported, "kept delta: format version " + std::to_string(header.version));
  }
  if (header.flags != 0 || header.reserved != 0) return bad_kept("reserved fields are not zero");
  file = file.subspan(sizeof(KeptHeader));
  if (header.list_bytes > file.size()) return bad_kept("truncated list");
  const ByteSpan list = file.first(static_cast<std::size_t>(header.list_bytes));
  if (xxh3_64(list) != header.list_hash) return bad_kept("list hash differs");
  KeptDelta read;
  DS_TRY(read_list(list, layout, read));
  DS_ASSIGN(read.delta, from_container(file.subspan(list.size()), layout));
  read.from.id = read.delta.from;
  read.to.id = read.delta.to;
  return read;
}

}  // namespace deltasync::delta
