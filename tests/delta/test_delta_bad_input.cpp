// Every bound of delta_format.md has a malformed input here that breaks it alone, with all hashes made right.
#include <gmock/gmock-matchers.h>

#include "base/hash.hpp"
#include "delta/mix.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;

template <class T>
void expect_error(const Result<T>& result, Errc code, const std::string& part) {
  ASSERT_FALSE(result.ok()) << "accepted; expected: " << part;
  EXPECT_EQ(result.error().code(), code) << result.error().to_string();
  EXPECT_THAT(result.error().message(), HasSubstr(part));
}

/// Two tiles of 8 × 8 bf16, and one of 3 × 3 bytes.
LayoutPtr small_layout() {
  TensorSpec a;
  a.name = "a";
  a.dtype = Dtype::bf16;
  a.shape = {16, 8};
  a.row_cuts = {8};
  TensorSpec b;
  b.name = "b";
  b.dtype = Dtype::u8;
  b.shape = {3, 3};
  return Layout::build({a, b}).value();
}

/// A record as it may never be.
struct ForgedRecord {
  std::uint64_t gap = 0;
  unsigned codec = 3;
  unsigned k = 2;
  std::uint64_t changed = 1;
  std::uint64_t payload_bytes = 0;
  std::uint64_t quotient_sum = 0;
  std::uint64_t gamma_bits = 0;
  std::uint64_t digest = 0;

  void write(std::vector<std::byte>& out) const {
    ByteWriter w(out);
    w.put_varint(gap);
    w.put<std::uint8_t>(static_cast<std::uint8_t>(codec | k << 4));
    w.put_varint(changed);
    w.put_varint(payload_bytes);
    if (codec == 2 || codec == 3) w.put_varint(quotient_sum);
    if (codec == 3) w.put_varint(gamma_bits);
    w.put<std::uint64_t>(digest);
  }
};

struct ForgedFrame {
  FrameHeader header;
  std::vector<std::byte> table;
  std::vector<std::byte> payloads;

  /// Fills in what the test has not set wrong on purpose, then the hashes.
  std::vector<std::byte> bytes() {
    if (header.table_bytes == 0) header.table_bytes = static_cast<std::uint32_t>(table.size());
    std::vector<std::byte> body = table;
    body.insert(body.end(), payloads.begin(), payloads.end());
    if (header.body_bytes == 0) header.body_bytes = body.size();
    if (header.body_hash == 0) header.body_hash = xxh3_64(body);
    if (header.header_hash == 0) header.header_hash = xxh3_64(bytes_of(header).first(56));
    std::vector<std::byte> out;
    ByteWriter(out).append(bytes_of(header));
    ByteWriter(out).append(body);
    return out;
  }
};

/// One record in a frame of its own.
ForgedFrame frame_of(const ForgedRecord& record, std::vector<unsigned> payload) {
  ForgedFrame frame;
  frame.header.tiles = 1;
  frame.header.changed = record.changed;
  record.write(frame.table);
  for (const unsigned byte : payload) frame.payloads.push_back(static_cast<std::byte>(byte));
  return frame;
}

// One change of +1 ulp at position 6: gap 6 = quotient 1, low bits 2. Planes: low 10b, quotient 10b, sign 0, length 1b.
ForgedRecord good_record() {
  ForgedRecord r;
  r.payload_bytes = 4;
  r.quotient_sum = 1;
  return r;
}
const std::vector<unsigned> kGoodPayload = {2, 2, 0, 1};

class BadFrame : public ::testing::Test {
 protected:
  const LayoutPtr layout_ = small_layout();

  void expect_refused(ForgedFrame frame, Errc code, const std::string& part) {
    expect_error(parse_frame(*layout_, frame.bytes()), code, part);
  }
  void expect_refused(const ForgedRecord& record, const std::string& part, Errc code = Errc::corrupt,
                      std::vector<unsigned> payload = kGoodPayload) {
    expect_refused(frame_of(record, std::move(payload)), code, part);
  }
};

TEST_F(BadFrame, TheGoodOneIsGood) {
  ForgedRecord record = good_record();
  std::vector<std::byte> memory(128);
  memory[12] = std::byte{1};
  record.digest = tile_digest(memory.data(), 16, 8, 16);
  memory[12] = std::byte{0};
  const std::uint64_t before = tile_digest(memory.data(), 16, 8, 16);
  const auto bytes = frame_of(record, kGoodPayload).bytes();
  const auto records = records_of(*layout_, bytes);
  ASSERT_EQ(records.size(), 1U);
  const auto digest = apply_tile(*layout_, records[0], memory.data(), 16, before);
  ASSERT_TRUE(digest.ok()) << digest.error().to_string();
  EXPECT_EQ(memory[12], std::byte{1});
}

TEST_F(BadFrame, Header) {
  const auto good = frame_of(good_record(), kGoodPayload);
  expect_error(parse_frame(*layout_, ByteSpan()), Errc::corrupt, "truncated header");
  auto f = good;
  expect_error(parse_frame(*layout_, ByteSpan(f.bytes()).first(63)), Errc::corrupt, "truncated header");
  f = good;
  f.header.magic ^= 1;
  expect_refused(f, Errc::corrupt, "magic");
  f = good;
  f.header.header_hash = 1;
  expect_refused(f, Errc::corrupt, "header hash");
  f = good;
  f.header.version = 2;
  expect_refused(f, Errc::unsupported, "version 2");
  f = good;
  f.header.flags = 1;
  expect_refused(f, Errc::corrupt, "reserved");
  f = good;
  f.header.reserved = 1;
  expect_refused(f, Errc::corrupt, "reserved");
  f = good;
  f.header.tiles = 0;
  expect_refused(f, Errc::corrupt, "no tiles");
  f = good;
  f.header.table_bytes = 1000;
  expect_refused(f, Errc::corrupt, "table is longer");
  f = good;
  f.header.tiles = 2;
  expect_refused(f, Errc::corrupt, "too short for its tiles");
  f = good;
  f.header.tiles = 0xFFFFFFFF;
  expect_refused(f, Errc::corrupt, "too short for its tiles");
  for (const std::uint64_t lie : {std::uint64_t{19}, std::uint64_t{21}, ~std::uint64_t{0}, ~std::uint64_t{63}}) {
    f = good;
    f.header.body_bytes = lie;
    expect_refused(f, Errc::corrupt, "size is not what its header says");
  }
  f = good;
  f.header.body_hash = 1;
  expect_refused(f, Errc::corrupt, "body hash");
  f = good;
  f.header.changed = 2;
  expect_refused(f, Errc::corrupt, "do not add up");
}

TEST_F(BadFrame, Records) {
  auto r = good_record();
  r.gap = 1;
  expect_refused(r, "first record");
  auto f = frame_of(good_record(), kGoodPayload);
  f.header.first_tile = layout_->tile_count();
  expect_refused(f, Errc::corrupt, "outside of the layout");
  f = frame_of(good_record(), kGoodPayload);
  f.header.first_tile = ~std::uint64_t{0};
  expect_refused(f, Errc::corrupt, "outside of the layout");
  for (const std::uint64_t gap : {std::uint64_t{2}, ~std::uint64_t{0}, ~std::uint64_t{1}}) {
    f = frame_of(good_record(), kGoodPayload);
    auto second = good_record();
    second.gap = gap;
    second.write(f.table);
    f.payloads.insert(f.payloads.end(), f.payloads.begin(), f.payloads.end());
    f.header.tiles = f.header.changed = 2;
    expect_refused(f, Errc::corrupt, "outside of the layout");
  }
  for (const unsigned codec : {0U, 7U, 15U}) {
    r = good_record();
    r.codec = codec;
    expect_refused(r, "codec " + std::to_string(codec), Errc::unsupported);
  }
  r = good_record();
  r.changed = 0;
  expect_refused(r, "without changed elements");
  r = good_record();
  r.changed = 65;
  expect_refused(r, "more changed elements than elements");
  r = good_record();
  r.changed = std::uint64_t{1} << 32;
  expect_refused(r, "more changed elements than elements");
  r = good_record();
  r.quotient_sum = 16;  // (64 − 1) >> 2 = 15
  expect_refused(r, "gap quotients");
  r = good_record();
  r.quotient_sum = ~std::uint64_t{0};
  expect_refused(r, "gap quotients");
  r = good_record();
  r.gamma_bits = 16;
  expect_refused(r, "magnitude bits");
  r = good_record();
  r.payload_bytes = 129;
  expect_refused(r, "longer than the raw tile");
  for (const std::uint64_t size : {3U, 5U}) {
    r = good_record();
    r.payload_bytes = size;
    expect_refused(r, "does not follow from its record");
  }
  f = frame_of(good_record(), {2, 2, 0});
  expect_refused(f, Errc::corrupt, "truncated payload");
  f = frame_of(good_record(), {2, 2, 0, 1, 0});
  expect_refused(f, Errc::corrupt, "behind the last payload");
  // A table that goes on behind its records, and one that ends within one.
  f = frame_of(good_record(), kGoodPayload);
  f.table.push_back(std::byte{0});
  expect_refused(f, Errc::corrupt, "bytes too many");
  f = frame_of(good_record(), kGoodPayload);
  f.header.table_bytes = static_cast<std::uint32_t>(f.table.size() - 1);
  expect_refused(f, Errc::corrupt, "truncated");
  // A varint in a longer form than it needs.
  f = frame_of(good_record(), kGoodPayload);
  f.table[0] = std::byte{0x80};
  f.table.insert(f.table.begin() + 1, std::byte{0});
  expect_refused(f, Errc::corrupt, "truncated");
}

TEST_F(BadFrame, RawRecords) {
  ForgedRecord raw;
  raw.codec = 1;
  raw.k = 0;
  raw.changed = 64;
  raw.payload_bytes = 128;
  const std::vector<unsigned> payload(128, 7);
  EXPECT_TRUE(parse_frame(*layout_, frame_of(raw, payload).bytes()).ok());
  auto r = raw;
  r.k = 1;
  expect_refused(r, "raw tile has a Rice parameter", Errc::corrupt, payload);
  r = raw;
  r.changed = 63;
  expect_refused(r, "does not count all", Errc::corrupt, payload);
  r = raw;
  r.payload_bytes = 126;
  expect_refused(r, "does not follow", Errc::corrupt, std::vector<unsigned>(126, 7));
}

TEST_F(BadFrame, ClassRecords) {
  ForgedRecord r;
  r.codec = 4;
  r.k = 0;
  r.payload_bytes = 129;
  expect_refused(r, "longer than the raw tile", Errc::corrupt, std::vector<unsigned>(129, 0));
  r.payload_bytes = 5;
  expect_refused(r, "truncated payload");
  // Tile 2 is of bytes.
  r.payload_bytes = 4;
  ForgedFrame frame = frame_of(r, kGoodPayload);
  EXPECT_TRUE(parse_frame(*layout_, ForgedFrame(frame).bytes()).ok());
  frame.header.first_tile = 2;
  expect_refused(frame, Errc::corrupt, "exponent classes in a tensor without exponents");
}

// A Rice payload may be within its record's bounds and still longer than the raw tile.
TEST_F(BadFrame, PayloadsLargerThanRawAreRefused) {
  ForgedRecord r;
  r.codec = 2;
  r.k = 15;
  r.changed = 64;
  r.payload_bytes = 64 * 15 / 8 + 8 + 128;
  expect_refused(r, "longer than the raw tile", Errc::corrupt, std::vector<unsigned>(r.payload_bytes, 0));
}

class BadPayload : public ::testing::Test {
 protected:
  const LayoutPtr layout_ = small_layout();

  void expect_refused(const ForgedRecord& record, std::vector<unsigned> payload, const std::string& part) {
    const auto bytes = frame_of(record, std::move(payload)).bytes();
    const auto records = records_of(*layout_, bytes);
    ASSERT_EQ(records.size(), 1U);
    std::vector<std::byte> memory(128);
    const auto untouched = memory;
    expect_error(verify_tile(*layout_, records[0], memory.data(), 16, 0), Errc::corrupt, part);
    expect_error(apply_tile(*layout_, records[0], memory.data(), 16, 0), Errc::corrupt, "tile 0 of a: ");
    EXPECT_EQ(memory, untouched);
  }
};

TEST_F(BadPayload, PaddingAndPlaneEnds) {
  expect_refused(good_record(), {2 | 4, 2, 0, 1}, "gap plane has bits behind");
  expect_refused(good_record(), {2, 2 | 4, 0, 1}, "gap quotient plane");
  expect_refused(good_record(), {2, 1, 0, 1}, "gap quotient plane");  // its one comes before its end
  expect_refused(good_record(), {2, 0, 0, 1}, "gap quotient plane");  // no one at all
  expect_refused(good_record(), {2, 3, 0, 1}, "gap quotient plane");  // two
  expect_refused(good_record(), {2, 2, 2, 1}, "sign plane has bits behind");
  expect_refused(good_record(), {2, 2, 0, 3}, "magnitude length plane");
  expect_refused(good_record(), {2, 2, 0, 0}, "magnitude length plane");
  auto r = good_record();
  r.gamma_bits = 1;
  r.payload_bytes = 5;
  expect_refused(r, {2, 2, 0, 2, 2}, "magnitude plane has bits behind");
}

TEST_F(BadPayload, Positions) {
  // Quotient 15 and low bits 3 are position 63, the last; two changes with the same gaps lead behind it.
  ForgedRecord r;
  r.changed = 2;
  r.quotient_sum = 15;  // (64 − 2) >> 2
  r.payload_bytes = 1 + 3 + 1 + 1;
  expect_refused(r, {0xF, 1, 0, 1, 0, 3}, "position is outside");
}

TEST_F(BadPayload, Magnitudes) {
  auto r = good_record();
  r.changed = 2;
  r.quotient_sum = 0;
  r.gamma_bits = 16;  // within 2 × 15, but all of it in one magnitude
  r.payload_bytes = 1 + 1 + 1 + 3 + 2;
  expect_refused(r, {0, 3, 0, 0, 0, 3, 0, 0}, "more bits than the element");
  r.changed = 1;
  r.gamma_bits = 15;
  r.payload_bytes = 1 + 1 + 1 + 2 + 2;
  expect_refused(r, {0, 1, 0, 0, 0x80, 0, 0}, "above half");    // +2^15
  expect_refused(r, {0, 1, 1, 0, 0x80, 1, 0}, "above half");    // −(2^15 + 1)
  expect_refused(r, {0, 1, 1, 0, 0x80, 0, 0}, "state digest");  // −2^15 itself is a change like any other
}

TEST_F(BadPayload, DigestOfEachCodec) {
  expect_refused(good_record(), kGoodPayload, "state digest");
  auto r = good_record();
  r.codec = 2;
  r.payload_bytes = 4;
  expect_refused(r, {2, 2, 5, 5}, "state digest");
  r.codec = 1;
  r.k = 0;
  r.quotient_sum = 0;
  r.changed = 64;
  r.payload_bytes = 128;
  expect_refused(r, std::vector<unsigned>(128, 9), "state digest");
}

// Records that did not come from parse_frame are refused by their sizes before any plane is read.
TEST_F(BadPayload, InconsistentRecords) {
  std::vector<std::byte> memory(128);
  const std::vector<std::byte> payload(300);
  for (const std::size_t size : {0U, 3U, 5U, 300U}) {
    for (const Codec codec : {Codec::raw, Codec::rice_absolute, Codec::rice_ulp}) {
      TileRecord record;
      record.codec = codec;
      record.rice_k = 2;
      record.changed = 1;
      record.quotient_sum = 1;
      record.payload = ByteSpan(payload).first(size);
      expect_error(verify_tile(*layout_, record, memory.data(), 16, 0), Errc::corrupt, "payload");
    }
  }
  TileRecord record;
  record.codec = Codec::rice_ulp;
  record.changed = 65;
  expect_error(verify_tile(*layout_, record, memory.data(), 16, 0), Errc::corrupt, "payload");
}

// ---- container -------------------------------------------------------------------------------------------------

class BadContainer : public ::testing::Test {
 protected:
  BadContainer() {
    std::vector<TensorSpec> specs(3);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      specs[i].name = std::string(1, static_cast<char>('a' + i));
      specs[i].shape = {40, 24};
    }
    specs[1].dtype = Dtype::f32;
    specs[2].dtype = Dtype::u8;
    model_ = make_model(3, specs);
    after_ = model_.half;
    mutate(after_, *model_.layout, 0.05, 3);
    good_ = to_container(encode_between(*model_.layout, model_.half, after_));
  }
  /// Whether the bytes decode to exactly `after_`.
  bool decodes(ByteSpan bytes) const {
    const auto delta = from_container(bytes, *model_.layout);
    if (!delta.ok()) return false;
    std::vector<std::byte> half = model_.half;
    auto digests = digests_of(*model_.layout, half);
    for (const Frame& frame : delta->frames) {
      const auto records = parse_frame(*model_.layout, frame.bytes);
      if (!records.ok()) return false;
      for (const TileRecord& record : *records) {
        const auto digest = apply_tile(*model_.layout, record, tile_in(*model_.layout, half, record.tile),
                                       stride_of(*model_.layout, record.tile), digests[record.tile]);
        if (!digest.ok()) return false;
        digests[record.tile] = *digest;
      }
    }
    EXPECT_EQ(half, after_);
    return root_digest(digests) == delta->to_root;
  }
  static void fix_header(std::vector<std::byte>& bytes) {
    store(bytes.data() + 128, xxh3_64(ByteSpan(bytes).first(128)));
  }
  void expect_refused(std::vector<std::byte> bytes, const std::string& part, Errc code = Errc::corrupt) {
    fix_header(bytes);
    expect_error(from_container(bytes, *model_.layout), code, part);
  }

  TestModel model_;
  std::vector<std::byte> after_;
  std::vector<std::byte> good_;
};

TEST_F(BadContainer, TheGoodOneDecodesToItsOwnBytes) {
  ASSERT_TRUE(decodes(good_));
  const auto delta = from_container(good_, *model_.layout);
  ASSERT_TRUE(delta.ok());
  EXPECT_EQ(to_container(*delta), good_);
  EXPECT_EQ(delta->from, kFrom);
  EXPECT_EQ(delta->to, kTo);
}

TEST_F(BadContainer, EveryTruncationIsRefused) {
  for (std::size_t size = 0; size < good_.size(); ++size) {
    // A copy that ends where it says, for the sanitizers.
    const std::vector<std::byte> cut(good_.begin(), good_.begin() + static_cast<std::ptrdiff_t>(size));
    const auto delta = from_container(cut, *model_.layout);
    ASSERT_FALSE(delta.ok()) << size;
    ASSERT_EQ(delta.error().code(), Errc::corrupt);
  }
  auto longer = good_;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(from_container(longer, *model_.layout).ok());
}

TEST_F(BadContainer, EveryBitFlipIsRefused) {
  for (std::size_t bit = 0; bit < good_.size() * 8; ++bit) {
    auto flipped = good_;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    ASSERT_FALSE(from_container(flipped, *model_.layout).ok()) << "bit " << bit;
  }
}

// Behind the hashes stand the bounds and the digest: a flip in a body whose hashes were made right again never ends in
// a state other than the true one. (Digests and counts of other tiles than the flipped one still decode.)
TEST_F(BadContainer, EveryBitFlipInABodyIsCaughtBehindTheHashes) {
  const auto header = load<FrameHeader>(good_.data() + 136);
  for (std::size_t bit = 0; bit < header.body_bytes * 8; ++bit) {
    auto flipped = good_;
    flipped[136 + 64 + bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    auto fixed = header;
    fixed.body_hash = xxh3_64(ByteSpan(flipped).subspan(136 + 64, header.body_bytes));
    fixed.header_hash = xxh3_64(bytes_of(fixed).first(56));
    store(flipped.data() + 136, fixed);
    ASSERT_FALSE(decodes(flipped)) << "bit " << bit;
  }
}

TEST_F(BadContainer, Header) {
  const auto with = [&](std::size_t offset, std::uint64_t value) {
    auto bytes = good_;
    store(bytes.data() + offset, value);
    return bytes;
  };
  expect_refused(with(0, 1), "magic");
  expect_refused(with(8, 2), "version 2", Errc::unsupported);
  expect_refused(with(8, std::uint64_t{1} | std::uint64_t{1} << 32), "reserved");
  expect_refused(with(120, 1), "reserved");
  expect_refused(with(16, 1), "layout", Errc::layout_mismatch);
  expect_refused(with(96, 7), "number of frames");
  expect_refused(with(104, ~std::uint64_t{0}), "size is not what its header says");
  expect_refused(with(112, 7), "changed elements");
  auto flipped = good_;
  flipped[128] ^= std::byte{1};
  expect_error(from_container(flipped, *model_.layout), Errc::corrupt, "header hash");
}

TEST_F(BadContainer, Frames) {
  const std::size_t frame_bytes = good_.size() - 136;
  // The same frame twice.
  auto twice = good_;
  twice.insert(twice.end(), good_.begin() + 136, good_.end());
  store(twice.data() + 104, std::uint64_t{frame_bytes * 2});
  expect_refused(twice, "frames out of order");
  // A frame that claims more than the rest of the file.
  auto lying = good_;
  auto header = load<FrameHeader>(lying.data() + 136);
  header.body_bytes += 1;
  header.header_hash = xxh3_64(bytes_of(header).first(56));
  store(lying.data() + 136, header);
  expect_refused(lying, "frame 0: delta: truncated frame");
  header.body_bytes = ~std::uint64_t{0};
  header.header_hash = xxh3_64(bytes_of(header).first(56));
  store(lying.data() + 136, header);
  expect_refused(lying, "truncated frame");
}

TEST_F(BadContainer, RandomBytesBehindRightHashesNeverBreakTheDecoder) {
  Random random(99);
  const auto header = load<FrameHeader>(good_.data() + 136);
  for (int trial = 0; trial < 20000; ++trial) {
    auto bytes = good_;
    for (std::uint64_t i = 0; i <= random.below(6); ++i) {
      bytes[136 + 64 + random.below(header.body_bytes)] = static_cast<std::byte>(random.next() >> 56);
    }
    auto fixed = header;
    fixed.body_hash = xxh3_64(ByteSpan(bytes).subspan(136 + 64, header.body_bytes));
    fixed.header_hash = xxh3_64(bytes_of(fixed).first(56));
    store(bytes.data() + 136, fixed);
    if (bytes == good_) continue;
    ASSERT_FALSE(decodes(bytes)) << "trial " << trial;
  }
}

}  // namespace
}  // namespace deltasync::delta::test
