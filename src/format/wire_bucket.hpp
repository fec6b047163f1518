// What a trainer's process tells an engine of its host that takes tensors out of memory which both map; protocol 5. The
// engine answers each with `end`, or an error, which ends the channel. Both ends are of one release.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "format/wire.hpp"

namespace deltasync::wire {

inline constexpr std::uint32_t kBucketRanksMax = 1024;

/// First on the connection, with the descriptor of the memory that has the two halves.
struct BucketHello {
  static constexpr Type kType = Type::bucket_hello;
  std::uint16_t protocol = kProtocolVersion;
  std::uint32_t rank = 0;  ///< of the trainer's that send to this engine
  std::uint32_t ranks = 1;
  std::uint64_t half_bytes = 0;
  std::string name;                ///< for messages
  std::vector<TileRange> tensors;  ///< that this rank sends: layout indices
  LayoutMessage layout;            ///< of all ranks
  std::vector<std::byte> encode() const;
  static Result<BucketHello> decode(ByteSpan payload);
};

/// A version begins. Answered when the engine wants it. With an id of zeros it is a question instead, answered with
/// BucketHeld when the engine wants any version.
struct BucketBegin {
  static constexpr Type kType = Type::bucket_begin;
  Version version;
  std::vector<std::byte> encode() const;
  static Result<BucketBegin> decode(ByteSpan payload);
};

/// What a trainer's new epoch is to come after.
struct BucketHeld {
  static constexpr Type kType = Type::end;
  std::uint64_t epoch = 0;  ///< of the engine's version; 0: it has none
  std::vector<std::byte> encode() const;
  static Result<BucketHeld> decode(ByteSpan payload);
};

/// Whole tensors, or bands of one. Where they lie in the half follows from their order (bucket/chunk.hpp).
struct BucketPart {
  std::uint32_t tensor = 0;
  std::uint64_t first_band = 0;  ///< 0 of a whole one
  std::uint64_t bands = 0;       ///< 0: the whole tensor
  bool operator==(const BucketPart&) const = default;
};
/// A half is full. Answered when it may be written again.
struct BucketChunk {
  static constexpr Type kType = Type::bucket_chunk;
  std::uint8_t half = 0;
  std::vector<BucketPart> parts;
  std::vector<std::uint64_t> digests;  ///< state digests of the parts' tiles, in their order
  std::vector<std::byte> encode() const;
  static Result<BucketChunk> decode(ByteSpan payload);
};

/// All of the rank's tensors were sent. Answered when the engine has verified all of every rank.
struct BucketFinish {
  static constexpr Type kType = Type::bucket_finish;
  std::uint64_t tensors = 0;
  std::uint64_t model_bytes = 0;  ///< of their elements
  Digest128 root;                 ///< over the digests of the rank's tiles, in the layout's order
  std::vector<std::byte> encode() const;
  static Result<BucketFinish> decode(ByteSpan payload);
};

}  // namespace deltasync::wire
