// A whole delta as one byte stream (delta_format.md "Container").
//
//   0       8        12      16       32           48         64          80        96       104
//   +-------+--------+-------+--------+------------+----------+-----------+---------+--------+
//   | magic | version| flags | layout | from epoch | to epoch | from root | to root | frames | …
//   |       |        |   0   | digest | and number | & number |           |         |        |
//   +-------+--------+-------+--------+------------+----------+-----------+---------+--------+
//   112           120       128      136
//   … frame bytes | changed | reserved | header hash |, then the frames one after the other
#include "delta/container.hpp"

#include "base/hash.hpp"
#include "delta/frame.hpp"

namespace deltasync::delta {

namespace {

constexpr std::uint64_t kContainerMagic = 0x3141544C45445344;  // "DSDELTA1"
constexpr std::uint32_t kContainerVersion = 1;

struct ContainerHeader {
  std::uint64_t magic = kContainerMagic;
  std::uint32_t version = kContainerVersion;
  std::uint32_t flags = 0;  ///< zero
  Digest128 layout;
  std::uint64_t from_epoch = 0;
  std::uint64_t from_number = 0;
  std::uint64_t to_epoch = 0;
  std::uint64_t to_number = 0;
  Digest128 from_root;
  Digest128 to_root;
  std::uint64_t frames = 0;
  std::uint64_t frame_bytes = 0;
  std::uint64_t changed = 0;
  std::uint64_t reserved = 0;  ///< zero
  std::uint64_t header_hash = 0;
};
static_assert(sizeof(ContainerHeader) == 136 && std::has_unique_object_representations_v<ContainerHeader>);
static_assert(offsetof(ContainerHeader, layout) == 16 && offsetof(ContainerHeader, from_epoch) == 32 &&
              offsetof(ContainerHeader, from_root) == 64 && offsetof(ContainerHeader, frames) == 96 &&
              offsetof(ContainerHeader, header_hash) == 128);

std::uint64_t hash_header(const ContainerHeader& header) {
  return xxh3_64(bytes_of(header).first(offsetof(ContainerHeader, header_hash)));
}

Error bad_container(const std::string& what) {
  return {Errc::corrupt, "delta: " + what};
}

Result<ContainerHeader> read_header(ByteSpan bytes, const Layout& layout) {
  if (bytes.size() < sizeof(ContainerHeader)) return bad_container("truncated header");
  const auto header = load<ContainerHeader>(bytes.data());
  if (header.magic != kContainerMagic) return bad_container("wrong magic");
  if (header.header_hash != hash_header(header)) return bad_container("header hash differs");
  if (header.version != kContainerVersion) {
    return Error(Errc::unsupported, "delta: format version " + std::to_string(header.version));
  }
  if (header.flags != 0 || header.reserved != 0) return bad_container("reserved fields are not zero");
  if (header.layout != layout.digest()) {
    return Error(Errc::layout_mismatch,
                 "delta: of layout " + to_string(header.layout) + ", not " + to_string(layout.digest()));
  }
  if (header.frame_bytes != bytes.size() - sizeof(header)) return bad_container("its size is not what its header says");
  return header;
}

/// Reads one frame from the front of `rest` into `delta`.
Status read_frame(const Layout& layout, ByteSpan& rest, Delta& delta) {
  DS_ASSIGN(const FrameHeader header, read_frame_header(rest));
  if (header.body_bytes > rest.size() - sizeof(header)) return bad_container("truncated frame");
  const ByteSpan bytes = rest.first(sizeof(header) + static_cast<std::size_t>(header.body_bytes));
  DS_ASSIGN(const std::vector<TileRecord> records, parse_frame(layout, bytes));
  if (!delta.frames.empty() && records.front().tile <= delta.frames.back().last_tile) {
    return bad_container("frames out of order");
  }
  Frame frame;
  frame.first_tile = records.front().tile;
  frame.last_tile = records.back().tile;
  frame.tiles = header.tiles;
  frame.changed = static_cast<std::uint32_t>(header.changed);
  frame.bytes.assign(bytes.begin(), bytes.end());
  for (const TileRecord& record : records) add_to_stats(record, delta.stats);
  delta.changed += header.changed;
  delta.frame_bytes += frame.bytes.size();
  delta.frames.push_back(std::move(frame));
  rest = rest.subspan(bytes.size());
  return {};
}

}  // namespace

std::vector<std::byte> container_header(const Delta& delta) {
  ContainerHeader header;
  header.layout = delta.layout;
  header.from_epoch = delta.from.epoch;
  header.from_number = delta.from.number;
  header.to_epoch = delta.to.epoch;
  header.to_number = delta.to.number;
  header.from_root = delta.from_root;
  header.to_root = delta.to_root;
  header.frames = delta.frames.size();
  header.frame_bytes = delta.frame_bytes;
  header.changed = delta.changed;
  header.header_hash = hash_header(header);
  const ByteSpan bytes = bytes_of(header);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> to_container(const Delta& delta) {
  std::vector<std::byte> out = container_header(delta);
  out.reserve(out.size() + static_cast<std::size_t>(delta.frame_bytes));
  ByteWriter writer(out);
  for (const Frame& frame : delta.frames) writer.append(frame.bytes);
  return out;
}

Result<Delta> from_container(ByteSpan bytes, const Layout& layout) {
  DS_ASSIGN(const ContainerHeader header, read_header(bytes, layout));
  Delta delta;
  delta.layout = header.layout;
  delta.from = {header.from_epoch, header.from_number};
  delta.to = {header.to_epoch, header.to_number};
  delta.from_root = header.from_root;
  delta.to_root = header.to_root;
  ByteSpan rest = bytes.subspan(sizeof(header));
  while (!rest.empty()) {
    DS_TRY(read_frame(layout, rest, delta).with_context("delta: frame " + std::to_string(delta.frames.size())));
  }
  if (delta.frames.size() != header.frames) return bad_container("its number of frames is not what its header says");
  if (delta.changed != header.changed) return bad_container("its frames do not add up to its changed elements");
  return delta;
}

}  // namespace deltasync::delta
