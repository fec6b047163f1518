// A delta between two states of one layout, as the agent keeps it and the wire carries it: a header and frames.
// A frame is a run of changed tiles that travels and is hashed as one; each tile in it is decoded alone.
// delta_format.md is normative for every byte.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {

/// Tiles whose frames are built together: consecutive tiles of the layout, whole bands where a band has several
/// panels. A function of the layout alone, so both ends agree on it. [first, end) global tile indices.
struct Batch {
  std::uint64_t first = 0;
  std::uint64_t end = 0;
};
inline constexpr std::uint64_t kBatchBytesTarget = 4u << 20;  ///< bytes of one half
inline constexpr std::uint64_t kBatchTilesMax = 4096;
std::vector<Batch> make_batches(const Layout& layout);
/// How many elements each has: at most kBatchBytesTarget, or one tile's.
std::vector<std::uint32_t> batch_elements(const Layout& layout, std::span<const Batch> batches);
/// Where its first tile begins in a half.
std::uint64_t batch_offset(const Layout& layout, const Batch& batch);

enum class Codec : std::uint8_t {
  raw = 1,
  rice_absolute = 2,
  rice_ulp = 3,
  rice_class = 4,
  dense_ulp = 5,
  raw_planes = 6
};
inline constexpr std::size_t kCodecEnd = 7;  ///< one above the largest value: tables by codec have so many entries
/// "raw", "rice_absolute" …, as the documents name them; "unknown" for what is none.
const char* to_string(Codec codec) noexcept;

enum class ValueForm : std::uint8_t {
  ulp,       ///< smallest; needs exactly the base
  absolute,  ///< idempotent
};

/// Where a record of a frame lies, so that those before it need not be read.
struct FrameMark {
  std::uint64_t next = 0;      ///< the tile after that of the record before
  std::uint32_t table = 0;     ///< bytes of the table before it
  std::uint32_t payloads = 0;  ///< bytes of payloads before its own
};
inline constexpr std::uint32_t kFrameMarkRecords = 32;

/// One frame's bytes (header and tile records) and what is needed to route it.
struct Frame {
  std::uint64_t first_tile = 0;  ///< lowest tile in it
  std::uint64_t last_tile = 0;   ///< highest
  std::uint32_t tiles = 0;
  std::uint32_t changed = 0;  ///< elements; a raw tile counts all of its own
  std::vector<std::byte> bytes;
  std::vector<FrameMark> marks;  ///< of each kFrameMarkRecords-th record but the first; none where it came from outside
};

struct CodecStats {
  std::uint64_t tiles = 0;
  std::uint64_t changed = 0;
  std::uint64_t bytes = 0;
};

/// Immutable once built; shared by the ring and every conversation that serves it.
struct Delta {
  Digest128 layout;
  VersionId from;
  VersionId to;
  Digest128 from_root;
  Digest128 to_root;
  std::vector<Frame> frames;      ///< by tile, disjoint
  std::uint64_t changed = 0;      ///< elements
  std::uint64_t frame_bytes = 0;  ///< sum over frames
  CodecStats stats[kCodecEnd];    ///< by Codec
};
using DeltaPtr = std::shared_ptr<const Delta>;

/// Memory of one tensor: element (r, c) at base + r·row_stride + c·element_bytes.
struct TensorMemory {
  std::byte* base = nullptr;
  std::size_t row_stride = 0;
};
/// Address of a tile's first element.
inline std::byte* tile_address(const TensorMemory& m, const Tile& t, std::uint32_t element_bytes) {
  return m.base + t.rect.row * m.row_stride + t.rect.col * element_bytes;
}

// ---- state digests -------------------------------------------------------------------------------------------

/// Digest of one tile (delta_format.md "State digest").
std::uint64_t tile_digest(const std::byte* first, std::size_t row_stride, std::uint64_t rows, std::uint64_t row_bytes);
/// The same of a tile of a half.
std::uint64_t tile_digest(const Layout& layout, ByteSpan half, std::uint64_t tile);
/// Copies a tile in one pass with its digest: that of the bytes that were stored, also while others write to `from`.
/// They are there for other threads, too.
std::uint64_t copy_tile_digest(std::byte* to, std::size_t to_stride, const std::byte* from, std::size_t from_stride,
                               std::uint64_t rows, std::uint64_t row_bytes);
/// Digests of all tiles of a half. `digests` has layout.tile_count() entries.
void half_digests(const Layout& layout, ByteSpan half, std::span<std::uint64_t> digests, ThreadPool& pool);
/// XXH3-128 over the digests, little-endian, in tile order.
Digest128 root_digest(std::span<const std::uint64_t> digests);

// ---- encoding ------------------------------------------------------------------------------------------------

struct EncodeRequest {
  VersionId from;
  VersionId to;
  Digest128 from_root;
  ValueForm form = ValueForm::ulp;
};
/// A diff in pieces, for a half that is still being filled: batch by batch, in any order. One thread runs while the
/// writers write, another one finishes, without waiting for it.
class Encoding {
 public:
  /// `batches` are the layout's. `digests` are those of `before`. The layout, the batches and the halves are borrowed.
  Encoding(const Layout& layout, std::span<const Batch> batches, ByteSpan before, ByteSpan after,
           std::vector<std::uint64_t> digests, ValueForm form);
  ~Encoding();
  Encoding(const Encoding&) = delete;
  Encoding& operator=(const Encoding&) = delete;

  /// Diffs these batches (by index; those that are done already are passed over) on the pool. From here until finish()
  /// their bytes must not change. Returns how many it did: those that finish() was faster with are thrown away, and
  /// what was read of them may be torn.
  std::size_t run_overlapped(std::span<const std::uint32_t> which, ThreadPool& pool);

  /// Diffs what is left, what run_overlapped() is at included, and makes the delta. Once.
  Delta finish(const EncodeRequest& request, ThreadPool& pool);
  /// How many batches were left to finish().
  std::size_t rest() const noexcept { return rest_; }
  /// Those of `after`, once finish() has returned.
  std::vector<std::uint64_t> take_digests() noexcept;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
  std::size_t rest_ = 0;
};
/// Diffs two halves of one layout. `digests` holds those of `before` on entry and those of `after` on return.
/// Runs batches on the pool; the result does not depend on the number of threads or the instruction set.
Delta encode(const Layout& layout, ByteSpan before, ByteSpan after, std::span<std::uint64_t> digests,
             const EncodeRequest& request, ThreadPool& pool);

/// A frame with only those tiles of `frame` that `wanted` covers (sorted, disjoint [first, end) ranges); no tiles =
/// no bytes. The frame must be one of our own (it is not validated again).
Frame cut_frame(const Frame& frame, std::span<const Batch> wanted);
/// What cut_frame makes of it, without making it: its tiles, changed elements and bytes. With `before`, what joins this
/// part to parts of frames before it.
struct CutSize {
  std::uint64_t tiles = 0;
  std::uint64_t changed = 0;
  std::uint64_t bytes = 0;  ///< 0 without tiles
  std::uint64_t next = 0;   ///< the tile after the last
};
CutSize cut_size(const Frame& frame, std::span<const Batch> wanted, CutSize before = {});
/// A frame that is joined of parts ends when it has so many.
inline constexpr std::uint64_t kJoinedBytes = 256u << 10;
/// One frame of raw tiles, read from a half: repairs, and full transfers of column subsets. `tiles` ascending.
Frame raw_frame(const Layout& layout, ByteSpan half, std::span<const std::uint64_t> tiles,
                std::span<const std::uint64_t> digests);
/// The same with each tile in raw_planes where that is smaller. Takes a CPU, for slow links.
Frame packed_frame(const Layout& layout, ByteSpan half, std::span<const std::uint64_t> tiles,
                   std::span<const std::uint64_t> digests);

/// The delta with other records for these tiles (ascending), whatever it had of them: raw copies from `after`, the half
/// that it leads to, whose digests are `digests`; or, where `after` is null, none. It leads to `to_root` then.
/// `batches` are the layout's. `corrupt` if a frame that has such a tile is damaged.
Result<Delta> amend(const Layout& layout, std::span<const Batch> batches, const Delta& delta,
                    std::span<const std::uint64_t> tiles, const ByteSpan* after, std::span<const std::uint64_t> digests,
                    const Digest128& to_root);

/// The frame with each tile of floats in rice_class where that is smaller, and as it was where not: no record is larger
/// than it was. Whatever form the frame had, the result needs exactly its base: `before` is the half that the delta
/// applies to (taken on trust; a wrong one makes tiles that no receiver accepts). encode() never makes this codec.
/// `corrupt` if the frame is.
Result<Frame> compact_frame(const Layout& layout, const Frame& frame, ByteSpan before);
/// compact_frame for each frame of a delta, on the pool. About 0.5 MiB of working memory a thread, and decoders' 2 MiB.
Result<Delta> compact(const Layout& layout, const Delta& delta, ByteSpan before, ThreadPool& pool);

/// For what is made of deltas beside the versions themselves.
struct MergeOptions {
  /// Copies these tiles of the chain's target, each row by row without padding, one after the other to `out`; false if
  /// they are not to be had. For tiles whose end follows neither as differences nor as new elements from the chain
  /// alone. Called from the pool's threads. None: a chain with such a tile cannot be merged.
  std::function<bool(std::span<const std::uint64_t> tiles, std::byte* out)> read_target;
  /// Set by the caller once it no longer wants the result: `cancelled` soon after.
  const std::atomic<bool>* cancel = nullptr;
};
/// One delta for a chain of them, from the first's base to the last's target, made without either (delta_format.md
/// "Merged deltas"). Its frames are divided as encode() divides them; a frame or tile that is in one delta of the chain
/// only is that delta's. The cost follows the changes, not the model. 3.5 MiB of working memory a thread, and
/// what a batch's records, target tiles and frame take.
/// Nothing: the chain cannot be merged. `corrupt` if a delta is not as encode() makes it, invalid_argument if they are
/// no chain, unsupported with a rice_class tile, no_space for lack of memory.
Result<std::optional<Delta>> merge(const Layout& layout, std::span<const Delta* const> chain,
                                   const MergeOptions& options, ThreadPool& pool);

/// compact() without the base: the old tiles are those of the version that the delta leads to, with the differences
/// subtracted. So tiles in rice_ulp and dense_ulp become what compact() makes of them; all others stay. `options` as
/// for merge(). Besides compact()'s working memory the target tiles of a frame, of a batch at most, for each thread.
/// Nothing: the target's tiles are not to be had. `corrupt` if the delta is, or what was read is not its target.
Result<std::optional<Delta>> compact_from_target(const Layout& layout, const Delta& delta, const MergeOptions& options,
                                                 ThreadPool& pool);

/// A whole delta as one byte stream (files, tests, the reference decoder), and back with full validation.
std::vector<std::byte> to_container(const Delta& delta);
Result<Delta> from_container(ByteSpan bytes, const Layout& layout);

// ---- decoding ------------------------------------------------------------------------------------------------

/// One changed tile inside a validated frame; `payload` points into the frame's bytes.
struct TileRecord {
  std::uint64_t tile = 0;
  Codec codec = Codec::raw;
  std::uint8_t rice_k = 0;         ///< of the gaps; in rice_class of those between exceptions; of dense_ulp's numbers
  std::uint32_t changed = 0;       ///< elements; all of them in a raw tile, packed or not
  std::uint32_t quotient_sum = 0;  ///< zeros in the plane of quotients; 0 for raw, raw_planes and rice_class
  std::uint32_t gamma_bits = 0;    ///< bits of the plane of low magnitude bits; escapes of dense_ulp; else 0
  std::uint64_t digest_after = 0;
  ByteSpan payload;
};
/// What decoding a record says of a payload that breaks a bound.
inline Error bad_payload(const char* what) {
  return {Errc::corrupt, std::string("payload: ") + what};
}
/// Checks hashes and every structural bound of a frame that came from outside (header hash before lengths, payload
/// hash before records, ascending tiles inside the layout, payload sizes) and lists its tiles.
/// `corrupt` names the tile. The records' payload contents are checked when they are decoded.
Result<std::vector<TileRecord>> parse_frame(const Layout& layout, ByteSpan frame);

/// Decodes a record over the tile's memory `first` (read only) and returns the digest after it; fails with `corrupt`
/// if that differs from record.digest_after or the payload breaks a bound. Writes nothing.
Result<std::uint64_t> verify_tile(const Layout& layout, const TileRecord& record, const std::byte* first,
                                  std::size_t row_stride, std::uint64_t digest_before);
/// verify_tile, and then writes the new elements. On failure nothing is written.
Result<std::uint64_t> apply_tile(const Layout& layout, const TileRecord& record, std::byte* first,
                                 std::size_t row_stride, std::uint64_t digest_before);
/// Writes the elements of a record that verify_tile has accepted on these very bytes (no digest work).
void commit_tile(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride);
/// Bytes that undo needs beside the record: 0 for rice_ulp and dense_ulp (they are inverted), the overwritten elements
/// otherwise, and for rice_class their positions too, which the record gives only together with what was overwritten.
void save_undo(const Layout& layout, const TileRecord& record, const std::byte* first, std::size_t row_stride,
               std::vector<std::byte>& out);
/// Reverts commit_tile / apply_tile. `undo` is what save_undo appended before it.
void undo_tile(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride, ByteSpan undo);

/// What resolve_tile keeps of a record: its positions and new elements; 0 for a raw tile, packed or not.
std::size_t resolved_bytes(const Layout& layout, const TileRecord& record);
/// verify_tile, and on success writes the record's changes to `out`, decoded: it has exactly resolved_bytes(), at any
/// address, and exchange_tile commits from it without decoding again. They hold on exactly these bytes at `first`.
Result<std::uint64_t> resolve_tile(const Layout& layout, const TileRecord& record, const std::byte* first,
                                   std::size_t row_stride, std::uint64_t digest_before, MutByteSpan out);
/// Exchanges the tile's changed elements with those in `resolved`, which resolve_tile wrote: the first time that
/// commits, the next time it rolls the commit back. Does nothing for a raw tile, packed or not.
void exchange_tile(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride,
                   MutByteSpan resolved);
/// Writes them without looking at what they replace: the tile is as committed by exchange_tile wherever its other
/// elements are those of the base, and `resolved` can be used again. Does nothing for a raw tile, packed or not.
void write_resolved(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride,
                    ByteSpan resolved);

// ---- instruction sets ----------------------------------------------------------------------------------------

/// "scalar", "avx2", "avx512" or "neon": what this process uses. Chosen once from the CPU; the environment variable
/// DELTASYNC_ISA forces one (an unavailable or unknown one is an error at start: the process says so and exits).
const char* isa_name();

}  // namespace deltasync::delta
