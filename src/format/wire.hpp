// The byte layout of every message between agent, receivers and trainer processes. No I/O here: src/net moves
// them. wire_protocol.md is normative and has the conversations.
//
//   0        4      6      8               16              24              32              40             48
//   +--------+------+------+---------------+---------------+---------------+---------------+---------------+
//   | magic  | type | flags| payload bytes |   request     | payload hash  |   reserved 0  |  header hash  |
//   +--------+------+------+---------------+---------------+---------------+---------------+---------------+
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync::wire {

inline constexpr std::uint32_t kMagic = 0x31575344;  // "DSW1"
/// 2: clocks, subscriptions; 3: forms of tiles, compact deltas; 4: epochs; 5: what wire_protocol.md says under
/// "Protocol 4 and 5".
inline constexpr std::uint16_t kProtocolVersion = 5;
inline constexpr std::uint16_t kProtocolOldest = 4;  ///< of peers that this side still understands
/// What one side of a conversation speaks, both ends included.
struct Protocols {
  std::uint16_t oldest = kProtocolOldest;
  std::uint16_t newest = kProtocolVersion;
};

enum class Type : std::uint16_t {
  // any conversation
  hello = 1,    ///< server → client, first message: protocol, nonce
  auth = 2,     ///< client → server: nonce, proof, role
  welcome = 3,  ///< server → client: proof, what is served
  error = 4,    ///< either way; ends the request (the connection too, if the framing itself was wrong)
  end = 5,      ///< closes a multi-message reply
  // receiver → agent and replies
  get_layout = 10,
  layout = 11,
  plan = 12,
  plan_reply = 13,
  get_digests = 14,
  digests = 15,
  get_extent = 16,
  extent = 17,  ///< payload = bytes of the half, straight from shared memory; no payload hash (tile digests verify it)
  get_frames = 18,
  frame = 19,          ///< payload = one frame of delta_format.md
  get_raw_tiles = 20,  ///< reply: frame… end
  release = 21,        ///< the receiver's acknowledgement: ends plan and lease; reply: end
  watch = 22,
  version_ready = 23,
  subscribe = 24,    ///< the tiles that later plans of this connection are about; reply: end
  check_tiles = 25,  ///< (5) these could not be verified: are they valid at the agent?
  tiles_checked = 26,
  report = 27,   ///< (5) what the receiver has committed, its last error; no reply
  get_lag = 28,  ///< (5)
  lag = 29,
  keep_alive = 30,  ///< (5) say that you are there while you owe an answer; no reply
  alive = 31,       ///< (5) comes before an answer that takes long, with its request
  relay_to = 32,    ///< (5) the receiver is a relay, which writes to that agent; reply: parents
  parents = 33,
  get_local = 34,  ///< (5) where the bytes of a full plan lie on the agent's host; reply: local
  local = 35,
  elsewhere = 36,  ///< (5) in place of a plan_reply: the agent has as many children as it may, these would serve you
  open_ucx = 37,   ///< (5) the bytes of this data connection are to go over UCX (wire_ucx.hpp)
  ucx_opened = 38,
  // trainer process ↔ agent, over the Unix socket
  trainer_hello = 40,
  trainer_welcome = 41,
  trainer_plan = 42,
  trainer_plan_ok = 43,
  trainer_notify = 44,  ///< "look at the segment", (5) and how long its offload took: no reply
  trainer_wait = 45,
  trainer_ready = 46,
  trainer_parents = 47,  ///< (5) the writer is a relay: where its versions come from; no reply
  map_segment = 48,      ///< (5) from a receiver on the agent's host, in place of trainer_hello; reply: segment
  segment = 49,          ///< (5) with a descriptor
  // trainer process → engine on the same host, over the engine's socket (wire_bucket.hpp)
  bucket_hello = 50,  ///< comes with the buckets' descriptor
  bucket_begin = 51,
  bucket_chunk = 52,
  bucket_finish = 53,
  trainer_arrival = 54,  ///< (5) the writer is a relay: what comes to it, with a descriptor of where; no reply
  trainer_delta = 55,    ///< (5) likewise: the delta that comes to it; no reply
  trainer_frames = 56,   ///< (5) a part of that delta; no reply
  // 60 to 63 are reserved: an earlier commit over ranks had them
};

/// Name of a type as the enumerator and wire_protocol.md have it; empty if there is none of that number.
std::string_view to_string(Type type) noexcept;
/// The same of a header's field, for messages: its name, or the number if it has none.
std::string type_name(std::uint16_t type);

struct Header {
  std::uint32_t magic = kMagic;
  std::uint16_t type = 0;
  std::uint16_t flags = 0;  ///< zero
  std::uint64_t payload_bytes = 0;
  std::uint64_t request = 0;       ///< chosen by the asker, repeated in every message of the reply
  std::uint64_t payload_hash = 0;  ///< XXH3-64 of the payload; 0 for Type::extent
  std::uint64_t reserved = 0;
  std::uint64_t header_hash = 0;  ///< XXH3-64 of the bytes before it
};
static_assert(sizeof(Header) == 48 && std::has_unique_object_representations_v<Header>);
static_assert(offsetof(Header, payload_bytes) == 8 && offsetof(Header, payload_hash) == 24 &&
              offsetof(Header, header_hash) == 40);

// Limits, in bytes. A header that claims more is refused before anything is allocated.
inline constexpr std::uint64_t kControlBytesMax = 1u << 20;
inline constexpr std::uint64_t kLayoutBytesMax = 512u << 20;  ///< compressed, sidecar included
inline constexpr std::uint64_t kLayoutRawBytesMax = 2048ull << 20;
inline constexpr std::uint64_t kDigestsBytesMax = 1024ull << 20;
inline constexpr std::uint64_t kFrameBytesMax = 64u << 20;
inline constexpr std::uint64_t kExtentBytesMax = 64u << 20;
inline constexpr std::uint64_t kRangesBytesMax = 64u << 20;  ///< requests with ranges, trainer_plan, bucket_chunk
inline constexpr std::size_t kErrorMessageBytesMax = 64u << 10;
inline constexpr std::size_t kPeerNameBytesMax = 256;
inline constexpr std::size_t kPathBytesMax = 4096;
inline constexpr std::uint64_t kDeltaStepsMax = 8192;  ///< a count: steps in one PlanReply
/// Largest payload of a type; 0 for an unknown type.
std::uint64_t payload_bytes_max(std::uint16_t type) noexcept;

/// Fills in hashes. `payload` empty for Type::extent, whose size is `extent_bytes`.
Header make_header(Type type, std::uint64_t request, ByteSpan payload, std::uint64_t extent_bytes = 0);
/// Magic, header hash, reserved fields, known type, length limit; in this order. protocol or corrupt.
Status check_header(const Header& header);

/// The protocol number that auth and trainer_hello begin with, whatever follows it in another version:
/// unsupported if this side does not speak it. To be asked before they are decoded.
Result<std::uint16_t> check_protocol(ByteSpan payload, const char* sender, Protocols ours = {});
/// What a hello is sent under in place of a request's number: the newest protocol that the server speaks. Its payload
/// names the oldest. Clients of protocol 4 look at that alone, and servers of it say 0 here.
inline constexpr std::uint64_t kHelloRequest = kProtocolVersion;
/// The newest protocol that both sides speak, from a server's hello: unsupported if there is none.
Result<std::uint16_t> agree_on_protocol(const Header& header, ByteSpan hello, const char* sender, Protocols ours = {});

// Each message: a struct, encode() and a static decode() that accepts exactly what encode() writes.

enum class Role : std::uint8_t { control = 1, data = 2, watch = 3 };

struct Hello {
  static constexpr Type kType = Type::hello;
  std::uint16_t protocol = kProtocolOldest;  ///< the oldest that the server speaks; see kHelloRequest
  std::uint8_t auth_required = 0;
  std::uint64_t instance = 0;  ///< random per agent process: tells a restart
  std::array<std::uint8_t, 32> nonce{};
  std::vector<std::byte> encode() const;
  static Result<Hello> decode(ByteSpan payload);
};
/// proof = HMAC-SHA256(token, "deltasync-client-1" ‖ server nonce ‖ client nonce ‖ role); zeros without a token.
struct Auth {
  static constexpr Type kType = Type::auth;
  std::uint16_t protocol = kProtocolVersion;
  Role role = Role::control;
  std::array<std::uint8_t, 32> nonce{};
  std::array<std::uint8_t, 32> proof{};
  std::string name;  ///< encode() cuts it to kPeerNameBytesMax
  std::vector<std::byte> encode() const;
  static Result<Auth> decode(ByteSpan payload);
};
/// proof = HMAC-SHA256(token, "deltasync-server-1" ‖ client nonce ‖ server nonce); zeros without a token.
struct Welcome {
  static constexpr Type kType = Type::welcome;
  std::array<std::uint8_t, 32> proof{};
  std::uint8_t has_layout = 0;
  Digest128 layout;
  Digest128 clock;             ///< who has the same one shares the sender's monotonic clock
  std::uint64_t clock_ns = 0;  ///< that clock, when this was sent
  std::vector<std::byte> encode() const;
  static Result<Welcome> decode(ByteSpan payload);
};
struct ErrorMessage {
  static constexpr Type kType = Type::error;
  Errc code = Errc::internal;
  std::string message;  ///< encode() cuts it to kErrorMessageBytesMax
  std::vector<std::byte> encode() const;
  static Result<ErrorMessage> decode(ByteSpan payload);
};
/// `end`, and the payload of `watch` and `get_layout`.
struct Empty {
  static constexpr Type kType = Type::end;
  std::vector<std::byte> encode() const { return {}; }
  static Result<Empty> decode(ByteSpan payload);
};
/// zstd frames of the canonical layout encoding and of the sidecar encoding, raw sizes first.
struct LayoutMessage {
  static constexpr Type kType = Type::layout;
  std::uint64_t layout_raw_bytes = 0;
  std::uint64_t sidecar_raw_bytes = 0;
  std::vector<std::byte> layout_zstd;
  std::vector<std::byte> sidecar_zstd;
  std::vector<std::byte> encode() const;
  static Result<LayoutMessage> decode(ByteSpan payload);
};

enum class WantKind : std::uint8_t { newest = 1, newer = 2, number = 3, label = 4 };

/// What the receiver has and what it wants. The base is named here and nowhere else (invariant 3).
struct PlanRequest {
  static constexpr Type kType = Type::plan;
  Digest128 layout;  ///< the one it is bound to
  VersionId base;    ///< epoch 0: nothing
  Digest128 base_root;
  WantKind want = WantKind::newest;
  std::uint64_t number = 0;   ///< WantKind::number
  std::string label;          ///< WantKind::label
  std::uint64_t wait_ms = 0;  ///< how long the agent may wait for the version to exist
  /// A partial state: some tiles at `base`, others missing. The reply then leases the target's half *and* lists the
  /// delta steps base → target (none if out of the ring: then the receiver's tiles are of no use).
  std::uint8_t partial = 0;
  std::uint8_t full_only = 0;  ///< no delta, please (wrong base found)
  /// Which tiles it is about: TileSet::digest() of what was subscribed to on this connection; zero: all. Roots and
  /// sizes, here and in the reply, are those of these tiles.
  Digest128 subscription;
  std::uint8_t compact = 0;  ///< the delta may come in exponent classes (rice_class): the link is slow
  std::uint64_t epoch = 0;   ///< WantKind::number: of this one; 0: of the newest
  /// (5) A version that is still arriving at the agent will do. Only there if it is 1, here and in the reply.
  std::uint8_t arriving = 0;
  std::vector<std::byte> encode() const;
  static Result<PlanRequest> decode(ByteSpan payload);
};

enum class PlanMode : std::uint8_t { up_to_date = 1, delta = 2, full = 3 };
/// As status pages and logs say it.
const char* mode_name(PlanMode mode) noexcept;

struct DeltaStep {
  VersionId from;
  VersionId to;
  Digest128 to_root;
  std::uint64_t frames = 0;
  std::uint64_t frame_bytes = 0;
  std::uint64_t changed = 0;  ///< elements
};
struct PlanReply {
  static constexpr Type kType = Type::plan_reply;
  PlanMode mode = PlanMode::up_to_date;
  std::uint64_t plan = 0;  ///< names plan and lease in data requests; unguessable; 0 if up to date
  Version target;
  Digest128 target_root;
  std::uint64_t full_bytes = 0;    ///< that a full transfer moves: of the half, or of the subscribed tiles
  std::vector<DeltaStep> steps;    ///< oldest first; for delta, and for full with PlanRequest::partial
  std::uint32_t pack_threads = 0;  ///< that pack tiles (RawForm::packed), at low priority; 0: none, or no full plan
  std::uint8_t arriving = 0;       ///< (5) full: it still arrives at the agent, and its tiles wait for that
  std::vector<std::byte> encode() const;
  static Result<PlanReply> decode(ByteSpan payload);
};

/// A sorted, disjoint list of non-empty tile ranges [first, end), varint-coded: count, then for each the gap from the
/// end before it and its length. put_ranges() aborts on any other list: the caller made it.
struct TileRange {
  std::uint64_t first = 0;
  std::uint64_t end = 0;
  bool operator==(const TileRange&) const = default;
};
void put_ranges(ByteWriter& out, const std::vector<TileRange>& ranges);
Result<std::vector<TileRange>> get_ranges(ByteReader& in);

/// What a request with ranges says before them: enough to refuse it before 16 bytes a range are allocated.
struct RangesHead {
  std::uint64_t plan = 0;
  std::uint64_t ranges = 0;  ///< how many are claimed
};

/// Names the tiles that a receiver of slices wants, once for a connection: a later one takes its place. Reply: `end`.
struct Subscribe {
  static constexpr Type kType = Type::subscribe;
  Digest128 layout;
  std::vector<TileRange> ranges;
  std::vector<std::byte> encode() const;
  /// Its `plan` is 0.
  static Result<RangesHead> decode_head(ByteSpan payload);
  static Result<Subscribe> decode(ByteSpan payload);
};
/// Digests of the plan's target, all subscribed tiles, as u64 little-endian. Only valid for full plans.
struct GetDigests {
  static constexpr Type kType = Type::get_digests;
  std::uint64_t plan = 0;
  std::vector<std::byte> encode() const;
  static Result<GetDigests> decode(ByteSpan payload);
};
/// One contiguous range of tiles that begins and ends at whole bands. Reply: one `extent` per ≤ kExtentBytesMax bytes,
/// in order, then `end`; or `error` (lease_revoked). Extents hold the half's bytes from the first tile's first byte
/// to the last tile's last byte, padding between tensors included.
struct GetExtent {
  static constexpr Type kType = Type::get_extent;
  std::uint64_t plan = 0;
  TileRange tiles;
  std::vector<std::byte> encode() const;
  static Result<GetExtent> decode(ByteSpan payload);
};
/// Frames of one step with only the tiles in `ranges`. Reply: `frame`…, `end`.
struct GetFrames {
  static constexpr Type kType = Type::get_frames;
  std::uint64_t plan = 0;
  std::uint32_t step = 0;  ///< index in PlanReply::steps
  std::vector<TileRange> ranges;
  std::vector<std::byte> encode() const;
  static Result<RangesHead> decode_head(ByteSpan payload);
  static Result<GetFrames> decode(ByteSpan payload);
};
/// How whole tiles come.
enum class RawForm : std::uint8_t {
  plain = 0,   ///< raw
  packed = 1,  ///< raw_planes where that is smaller, else raw
};
/// Whole tiles of the plan's target, from its half. Reply: `frame`…, `end`; or `error` (lease_revoked; unsupported if
/// the agent packs none).
struct GetRawTiles {
  static constexpr Type kType = Type::get_raw_tiles;
  std::uint64_t plan = 0;
  std::vector<TileRange> ranges;
  RawForm form = RawForm::plain;
  std::vector<std::byte> encode() const;
  static Result<RangesHead> decode_head(ByteSpan payload);
  static Result<GetRawTiles> decode(ByteSpan payload);
};
/// Tiles of a plan's target that could not be verified though they came through whole. Reply: tiles_checked.
struct CheckTiles {
  static constexpr Type kType = Type::check_tiles;
  std::uint64_t plan = 0;
  std::vector<TileRange> ranges;
  std::vector<std::byte> encode() const;
  static Result<RangesHead> decode_head(ByteSpan payload);
  static Result<CheckTiles> decode(ByteSpan payload);
};
struct TilesChecked {
  static constexpr Type kType = Type::tiles_checked;
  std::uint8_t plan_again =
      0;  ///< they were not, or there is another version by now: other bytes come with another plan
  std::vector<std::byte> encode() const;
  static Result<TilesChecked> decode(ByteSpan payload);
};
struct Release {
  static constexpr Type kType = Type::release;
  std::uint64_t plan = 0;
  std::vector<std::byte> encode() const;
  static Result<Release> decode(ByteSpan payload);
};
struct VersionReady {
  static constexpr Type kType = Type::version_ready;
  Version version;
  Digest128 layout;
  std::vector<std::byte> encode() const;
  static Result<VersionReady> decode(ByteSpan payload);
};

// ---- trainer ↔ agent -----------------------------------------------------------------------------------------

struct TrainerHello {
  static constexpr Type kType = Type::trainer_hello;
  std::uint16_t protocol = kProtocolVersion;
  std::uint32_t writer_index = 0;
  std::uint32_t writers = 1;
  std::int32_t pid = 0;  ///< in the writer's own PID namespace, for messages only; the agent uses SO_PEERCRED
  std::string name;
  LayoutMessage layout;
  std::vector<std::byte> encode() const;
  static Result<TrainerHello> decode(ByteSpan payload);
};
struct TrainerWelcome {
  static constexpr Type kType = Type::trainer_welcome;
  std::string segment_name;  ///< file name in shm_dir
  std::string shm_dir;
  std::uint64_t generation = 0;
  VersionId newest;  ///< last sealed version; epoch 0 if none
  /// (5) The latest that the agent has heard of, by its segment or receivers, 0: none. A new one comes after it.
  std::uint64_t epoch = 0;
  std::uint64_t instance = 0;  ///< (5) of the agent, as in its hello to receivers
  std::vector<std::byte> encode(std::uint16_t protocol = kProtocolVersion) const;
  static Result<TrainerWelcome> decode(ByteSpan payload, std::uint16_t protocol = kProtocolVersion);
};
struct PlanRect {
  std::uint32_t tensor = 0;
  std::uint64_t row = 0, col = 0, rows = 0, cols = 0;
};
struct TrainerPlan {
  static constexpr Type kType = Type::trainer_plan;
  std::vector<PlanRect> rects;
  std::uint64_t deadline_ms = 0;  ///< to wait for the other writers' plans
  /// (5) An agent has accepted it before, and may have been restarted since: it is not judged, and nobody waits.
  std::uint8_t agreed = 0;
  std::vector<std::byte> encode(std::uint16_t protocol = kProtocolVersion) const;
  static Result<TrainerPlan> decode(ByteSpan payload, std::uint16_t protocol = kProtocolVersion);
};
struct TrainerNotify {
  static constexpr Type kType = Type::trainer_notify;
  std::uint64_t offload_ns = 0;  ///< begin called → sealed
  std::uint64_t guard_ns = 0;    ///< of that, waiting for the half
  std::vector<std::byte> encode() const;
  static Result<TrainerNotify> decode(ByteSpan payload);
};
/// Waits until the agent serves a version at or after `version` in the same epoch. Reply: trainer_ready or error.
struct TrainerWait {
  static constexpr Type kType = Type::trainer_wait;
  VersionId version;
  std::uint64_t deadline_ms = 0;
  std::vector<std::byte> encode() const;
  static Result<TrainerWait> decode(ByteSpan payload);
};
struct TrainerReady {
  static constexpr Type kType = Type::trainer_ready;
  VersionId version;
  std::uint64_t delta_bytes = 0;
  std::uint64_t changed = 0;
  std::uint64_t encode_us = 0;
  std::vector<std::byte> encode() const;
  static Result<TrainerReady> decode(ByteSpan payload);
};

}  // namespace deltasync::wire
