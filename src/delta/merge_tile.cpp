#include "delta/merge_tile.hpp"

#include <cstring>

#include "delta/codec.hpp"
#include "delta/mix.hpp"

namespace deltasync::delta {

namespace {

template <class U>
U* elements(std::byte* memory) noexcept {
  return reinterpret_cast<U*>(memory);
}

bool marked(const std::uint64_t* mask, std::uint32_t position) noexcept {
  return (mask[position / 64] >> (position % 64) & 1) != 0;
}
void mark(std::uint64_t* mask, std::uint32_t position) noexcept {
  mask[position / 64] |= std::uint64_t{1} << (position % 64);
}

}  // namespace

TileMerger::TileMerger(const Kernels& kernels) : kernels_(kernels), arena_(new Arena) {
  std::memset(arena_->sums, 0, sizeof arena_->sums);
}

void TileMerger::begin(const TileShape& shape) {
  if (shape_.elements() != 0) gather_elements();
  shape_ = shape;
  all_known_ = some_known_ = false;
}

// ---- records -----------------------------------------------------------------------------------------------------

template <class U, bool kFloat>
void TileMerger::add_differences(const DecodedTile& tile) {
  U* const sums = elements<U>(arena_->sums);
  U* const values = elements<U>(arena_->values);
  const U* const diffs = elements<U>(tile.values);
  for (std::uint32_t i = 0; i < tile.count; ++i) {
    const std::uint16_t p = tile.positions[i];
    if (all_known_ || (some_known_ && marked(arena_->known, p))) {
      values[p] = add_ulps<U, kFloat>(values[p], diffs[i]);
    } else {
      sums[p] = static_cast<U>(sums[p] + diffs[i]);
      mark(arena_->summed, p);
    }
  }
}

template <class U>
void TileMerger::add_values(const DecodedTile& tile) {
  U* const values = elements<U>(arena_->values);
  const U* const news = elements<U>(tile.values);
  for (std::uint32_t i = 0; i < tile.count; ++i) {
    const std::uint16_t p = tile.positions[i];
    values[p] = news[i];
    if (!all_known_) mark(arena_->known, p);
  }
  some_known_ = true;
}

Status TileMerger::add(const TileRecord& record) {
  if (record.codec == Codec::raw) {
    if (record.payload.size() != shape_.raw_bytes()) return Error(Errc::corrupt, "payload: not the raw tile's size");
    std::memcpy(arena_->values, record.payload.data(), record.payload.size());
    all_known_ = true;
    return {};
  }
  const CodecTraits& codec = traits(record.codec);
  if (!codec.decodes_alone()) return Error(Errc::unsupported, std::string("merging a tile in ") + codec.name);
  DS_ASSIGN(const DecodedTile tile, decode_alone(kernels_, shape_, record));
  if (codec.differences) {
    with_element(shape_, [&]<class U, bool kFloat>() { add_differences<U, kFloat>(tile); });
  } else {
    with_element(shape_, [&]<class U, bool kFloat>() { add_values<U>(tile); });
  }
  return {};
}

// ---- the end -----------------------------------------------------------------------------------------------------

template <class U>
void TileMerger::gather() {
  Arena& a = *arena_;
  U* const sums = elements<U>(a.sums);
  U* const diffs = elements<U>(a.diffs);
  std::uint32_t listed = 0;
  listed_known_ = 0;
  const std::uint32_t words = (shape_.elements() + 63) / 64;
  for (std::uint32_t w = 0; w < words; ++w) {
    const std::uint64_t known = a.known[w];
    listed_known_ += static_cast<unsigned>(__builtin_popcountll(known));
    for (std::uint64_t left = a.summed[w] | known; left != 0; left &= left - 1) {
      const auto bit = static_cast<unsigned>(__builtin_ctzll(left));
      const std::uint32_t p = w * 64 + bit;
      a.positions[listed] = static_cast<std::uint16_t>(p);
      diffs[listed] = sums[p];
      // Branches would follow the data, which has no pattern.
      listed += (sums[p] != 0 ? 1U : 0U) | static_cast<unsigned>(known >> bit & 1);
      sums[p] = 0;
    }
    a.summed[w] = a.known[w] = 0;
  }
  listed_ = listed;
}

void TileMerger::gather_elements() {
  with_element(shape_, [&]<class U, bool kFloat>() { gather<U>(); });
}

void TileMerger::append_whole(const std::byte* bytes, TileRecord& record, std::vector<std::byte>& out) const {
  record.codec = Codec::raw;
  record.rice_k = 0;
  record.changed = shape_.elements();
  record.quotient_sum = 0;
  record.gamma_bits = 0;
  out.insert(out.end(), bytes, bytes + shape_.raw_bytes());
}

TileMerger::Outcome TileMerger::encode(const std::byte* target, TileRecord& record, std::vector<std::byte>& out) {
  const ChangedElements changed{arena_->positions, arena_->diffs, listed_};
  const std::size_t row_bytes = shape_.row_bytes();
  if (all_known_ || listed_known_ == shape_.elements()) {
    append_whole(arena_->values, record, out);
    return Outcome::changed;
  }
  if (listed_ == 0) return Outcome::unchanged;
  if (listed_known_ == 0 && encode_differences(kernels_, shape_, changed, scratch_, record, out)) {
    return Outcome::changed;
  }
  if (listed_known_ == listed_ &&
      encode_elements(kernels_, shape_, changed, arena_->values, row_bytes, scratch_, record, out)) {
    return Outcome::changed;
  }
  if (target == nullptr) return Outcome::needs_target;
  encode_payload(kernels_, shape_, changed, target, row_bytes, ValueForm::absolute, scratch_, record, out);
  return Outcome::changed;
}

Result<TileMerger::Outcome> TileMerger::finish(const std::byte* target, TileRecord& record,
                                               std::vector<std::byte>& out) {
  gather_elements();
  const std::byte* const whole = target != nullptr                                  ? target
                                 : all_known_ || listed_known_ == shape_.elements() ? arena_->values
                                                                                    : nullptr;
  if (whole != nullptr &&
      tile_digest(whole, shape_.row_bytes(), shape_.rows, shape_.row_bytes()) != record.digest_after) {
    return Error(Errc::corrupt, target != nullptr ? "the tile that was read is not of the chain's target"
                                                  : "the state digest after the chain differs");
  }
  const Outcome outcome = encode(target, record, out);
  shape_ = {};
  return outcome;
}

}  // namespace deltasync::delta
