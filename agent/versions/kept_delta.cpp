#include "agent/versions/kept_delta.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/hash.hpp"
#include "base/label.hpp"
#include "delta/container.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kMagic = 0x31445450454B5344;  // "DSKEPTD1"
constexpr std::uint32_t kVersion = 1;

struct Header {
  std::uint64_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t flags = 0;  ///< zero
  std::uint64_t list_bytes = 0;
  std::uint64_t list_hash = 0;  ///< XXH3-64
  std::uint64_t reserved = 0;   ///< zero
  std::uint64_t header_hash = 0;
};
static_assert(sizeof(Header) == 48 && std::has_unique_object_representations_v<Header>);
static_assert(offsetof(Header, list_bytes) == 16 && offsetof(Header, header_hash) == 40);

std::uint64_t hash_of(const Header& header) {
  return xxh3_64(bytes_of(header).first(offsetof(Header, header_hash)));
}

Error bad(const std::string& what) {
  return {Errc::corrupt, "kept delta: " + what};
}

/// The labels and the digests before.
Status read_list(ByteSpan list, const Layout& layout, RingEntry& entry) {
  ByteReader in(list);
  entry.from.label = in.get_string(kLabelBytesMax);
  entry.to.label = in.get_string(kLabelBytesMax);
  const auto tiles = in.get<std::uint64_t>();
  if (in.failed() || tiles != in.remaining() / sizeof(DigestBefore)) return bad("its list is not as long as it says");
  entry.before.reserve(static_cast<std::size_t>(tiles));
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < tiles; ++i) {
    const auto tile = in.get<std::uint64_t>();
    if (tile < next || tile >= layout.tile_count()) return bad("tile " + std::to_string(tile) + " is out of order");
    entry.before.push_back({tile, in.get<std::uint64_t>()});
    next = tile + 1;
  }
  DS_TRY(in.finish("kept delta"));
  for (const auto* label : {&entry.from.label, &entry.to.label}) {
    if (auto checked = check_label(*label); !checked) return bad(checked.error().message());
  }
  return {};
}

}  // namespace

std::vector<std::byte> kept_delta_head(const RingEntry& entry) {
  std::vector<std::byte> list;
  ByteWriter out(list);
  out.put_string(entry.from.label);
  out.put_string(entry.to.label);
  out.put<std::uint64_t>(entry.before.size());
  for (const DigestBefore& before : entry.before) {
    out.put(before.tile);
    out.put(before.digest);
  }
  Header header;
  header.list_bytes = list.size();
  header.list_hash = xxh3_64(list);
  header.header_hash = hash_of(header);
  std::vector<std::byte> head;
  ByteWriter writer(head);
  writer.append(bytes_of(header));
  writer.append(list);
  writer.append(delta::container_header(*entry.delta));
  return head;
}

Result<std::shared_ptr<RingEntry>> decode_kept_delta(ByteSpan file, const Layout& layout) {
  if (file.size() < sizeof(Header)) return bad("truncated header");
  const auto header = load<Header>(file.data());
  if (header.magic != kMagic) return bad("wrong magic");
  if (header.header_hash != hash_of(header)) return bad("header hash differs");
  if (header.version != kVersion) {
    return Error(Errc::unsupported, "kept delta: format version " + std::to_string(header.version));
  }
  if (header.flags != 0 || header.reserved != 0) return bad("reserved fields are not zero");
  file = file.subspan(sizeof(Header));
  if (header.list_bytes > file.size()) return bad("truncated list");
  const ByteSpan list = file.first(static_cast<std::size_t>(header.list_bytes));
  if (xxh3_64(list) != header.list_hash) return bad("list hash differs");
  RingEntry read;
  DS_TRY(read_list(list, layout, read));
  DS_ASSIGN(delta::Delta delta, delta::from_container(file.subspan(list.size()), layout));
  read.from.id = delta.from;
  read.to.id = delta.to;
  auto entry = RingEntry::make(std::move(delta), std::move(read.from), std::move(read.to), 0, std::move(read.before));
  entry->found_at_start = true;
  return entry;
}

std::vector<RingEntryPtr> chain_to(const VersionId& version, const Digest128& root, std::vector<std::uint64_t> digests,
                                   const std::vector<RingEntryPtr>& deltas) {
  std::vector<RingEntryPtr> chain;
  VersionId to = version;
  Digest128 to_root = root;
  // Each delta leads to a later version than it comes from, so this ends.
  for (;;) {
    const auto found = std::find_if(deltas.begin(), deltas.end(), [&](const RingEntryPtr& entry) {
      const delta::Delta& d = *entry->delta;
      return d.to == to && d.to_root == to_root && d.from < d.to;
    });
    if (found == deltas.end()) break;
    for (const DigestBefore& before : (*found)->before) digests[static_cast<std::size_t>(before.tile)] = before.digest;
    if (delta::root_digest(digests) != (*found)->delta->from_root) break;
    to = (*found)->delta->from;
    to_root = (*found)->delta->from_root;
    chain.push_back(*found);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace deltasync::agent
