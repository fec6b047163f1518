// The bytes of a frame (delta_format.md "Frames").
//
//   0       4       6       8            16      20       24         32         40         48         56       64
//   +-------+-------+-------+------------+-------+--------+----------+----------+----------+----------+--------+
//   | magic |version| flags | first tile | tiles | table  | changed  |  body    |  body    | reserved | header |
//   |       |       |   0   |            |       | bytes  | elements |  bytes   |  hash    |    0     |  hash  |
//   +-------+-------+-------+------------+-------+--------+----------+----------+----------+----------+--------+
//   body = record table (table bytes), then the payloads in the order of the records
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "delta/delta.hpp"
#include "delta/geometry.hpp"

namespace deltasync::delta {

inline constexpr std::uint32_t kFrameMagic = 0x31465344;  // "DSF1"
inline constexpr std::uint16_t kFrameVersion = 1;

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint16_t version = kFrameVersion;
  std::uint16_t flags = 0;  ///< zero
  std::uint64_t first_tile = 0;
  std::uint32_t tiles = 0;
  std::uint32_t table_bytes = 0;
  std::uint64_t changed = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t body_hash = 0;  ///< XXH3-64
  std::uint64_t reserved = 0;   ///< zero
  std::uint64_t header_hash = 0;
};
static_assert(sizeof(FrameHeader) == 64 && std::has_unique_object_representations_v<FrameHeader>);
static_assert(offsetof(FrameHeader, first_tile) == 8 && offsetof(FrameHeader, table_bytes) == 20 &&
              offsetof(FrameHeader, body_bytes) == 32 && offsetof(FrameHeader, header_hash) == 56);

/// What header_hash is.
std::uint64_t hash_header(const FrameHeader& header) noexcept;
/// Reads a header and checks all that can be checked without the body. `corrupt` or `unsupported`.
Result<FrameHeader> read_frame_header(ByteSpan bytes);

/// Gathers records and payloads of ascending tiles. Reusable after finish(), keeping its memory.
class FrameBuilder {
 public:
  /// Where the payload of the next record is appended, before add().
  std::vector<std::byte>& payloads() noexcept { return payloads_; }
  /// `record.payload` is not looked at.
  void add(const TileRecord& record);
  /// Of finish(), so far; only with tiles.
  std::size_t bytes() const noexcept { return sizeof(FrameHeader) + table_.size() + payloads_.size(); }
  std::uint32_t tiles() const noexcept { return tiles_; }
  /// No tiles: an empty frame without bytes.
  Frame finish();

 private:
  std::vector<std::byte> table_;
  std::vector<std::byte> payloads_;
  std::vector<FrameMark> marks_;
  std::size_t payload_end_ = 0;  ///< of the last record's payload
  std::uint64_t first_tile_ = 0;
  std::uint64_t last_tile_ = 0;
  std::uint32_t tiles_ = 0;
  std::uint64_t changed_ = 0;
};

/// cut_frame() into a builder, whose tiles are all below the wanted ones.
void cut_into(FrameBuilder& builder, const Frame& frame, std::span<const Batch> wanted);

std::size_t varint_bytes(std::uint64_t value) noexcept;
/// Bytes of a record in the table without its tile gap; `payload_size` stands for record.payload.
std::size_t record_bytes(const TileRecord& record, std::size_t payload_size) noexcept;
/// Counts a tile in a table by codec; record.payload is there.
void add_to_stats(const TileRecord& record, CodecStats (&stats)[kCodecEnd]) noexcept;
/// Adds one table to another.
void add_to_stats(const CodecStats (&from)[kCodecEnd], CodecStats (&stats)[kCodecEnd]) noexcept;

/// The frames of all batches, in their order, become the delta's; those without tiles are left out.
void take_frames(std::vector<Frame>& frames, Delta& delta);

/// A tile of a half row by row without padding, as a raw payload has it. Returns where it ends.
std::byte* copy_tile(const Layout& layout, ByteSpan half, std::uint64_t tile, std::byte* out) noexcept;
/// Bytes of the copies of all these tiles.
std::size_t tile_bytes(const Layout& layout, std::span<const std::uint64_t> tiles) noexcept;
/// packed_frame() of such copies, one after the other.
Frame packed_frame_of_copy(const Layout& layout, ByteSpan copy, std::span<const std::uint64_t> tiles,
                           std::span<const std::uint64_t> digests);

/// Bytes of the payload that a record announces; of rice_class and raw_planes no one can tell before its header is
/// read.
std::size_t payload_bytes(const TileShape& shape, const TileRecord& record) noexcept;

}  // namespace deltasync::delta
