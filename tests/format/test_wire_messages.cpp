// Every wire message: round trip, every truncation refused, every bit flip refused or canonical, every limit kept.
#include "format/wire.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <string_view>

#include "base/hash.hpp"
#include "format/wire_bucket.hpp"
#include "format/wire_local.hpp"
#include "format/wire_report.hpp"
#include "format/wire_ucx.hpp"

namespace deltasync::wire {
namespace {

using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Digest128 digest_of(std::uint8_t seed) {
  Digest128 d;
  for (std::size_t i = 0; i < d.bytes.size(); ++i) d.bytes[i] = static_cast<std::uint8_t>(seed + 7 * i);
  return d;
}
std::array<std::uint8_t, 32> nonce_of(std::uint8_t seed) {
  std::array<std::uint8_t, 32> n{};
  for (std::size_t i = 0; i < n.size(); ++i) n[i] = static_cast<std::uint8_t>(seed ^ (i * 31));
  return n;
}
Bytes blob_of(std::size_t n, std::uint8_t seed) {
  Bytes b(n);
  for (std::size_t i = 0; i < n; ++i) b[i] = static_cast<std::byte>(seed + i);
  return b;
}
LayoutMessage layout_message() {
  return {1234, 99, blob_of(40, 1), blob_of(7, 200)};
}

/// A message as the tests need it: some valid encodings, and decode-then-encode.
struct Case {
  std::string name;
  std::vector<Bytes> samples;
  std::function<Result<Bytes>(ByteSpan)> reencode;
};

template <class T>
Case make_case(std::string name, std::vector<T> samples) {
  Case c;
  c.name = std::move(name);
  for (const T& sample : samples) c.samples.push_back(sample.encode());
  c.reencode = [](ByteSpan bytes) -> Result<Bytes> {
    DS_ASSIGN(const T message, T::decode(bytes));
    return message.encode();
  };
  return c;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  cases.push_back(make_case<Hello>("hello", {{1, 1, 0xFEDCBA9876543210, nonce_of(3)}}));
  cases.push_back(make_case<Auth>("auth", {{1, Role::watch, nonce_of(1), nonce_of(2), "node-7"}}));
  cases.push_back(make_case<Welcome>("welcome", {{nonce_of(9), 1, digest_of(4), digest_of(5), 0x0123456789ABCDEF}}));
  cases.push_back(make_case<ErrorMessage>("error", {{Errc::gone, "version 4 is past"}, {Errc::internal, ""}}));
  cases.push_back(make_case<LayoutMessage>("layout", {layout_message()}));
  cases.push_back(make_case<PlanRequest>(
      "plan", {{digest_of(1), {5, 6}, digest_of(2), WantKind::label, 0, "global_step_1200", 30'000, 1, 0, {}, 0, 0},
               {digest_of(1), {}, {}, WantKind::number, 1u << 20, "", 0, 0, 1, digest_of(9), 1, 0x0102030405060708}}));
  cases.push_back(make_case<PlanReply>(
      "plan_reply", {{PlanMode::delta,
                      0xABCDEF0102030405,
                      {{7, 8}, "step"},
                      digest_of(6),
                      1u << 30,
                      {{{7, 6}, {7, 7}, digest_of(8), 3, 4, 5}, {{7, 7}, {7, 8}, digest_of(6), 1, 2, 3}},
                      16},
                     {PlanMode::up_to_date, 0, {{7, 8}, ""}, digest_of(6), 1, {}, 0}}));
  cases.push_back(make_case<Subscribe>("subscribe", {{digest_of(3), {{0, 1}, {500, 90'000'000'000}}}}));
  cases.push_back(make_case<GetDigests>("get_digests", {{77}}));
  cases.push_back(make_case<GetExtent>("get_extent", {{77, {3, 900}}}));
  cases.push_back(make_case<GetFrames>("get_frames", {{77, 2, {{0, 1}, {1, 2}, {500, 90'000'000'000}}}, {1, 0, {}}}));
  cases.push_back(make_case<GetRawTiles>("get_raw_tiles",
                                         {{77, {{5, 6}, {300, 4000}}, RawForm::plain}, {77, {}, RawForm::packed}}));
  cases.push_back(make_case<Release>("release", {{78}}));
  cases.push_back(make_case<VersionReady>("version_ready", {{{{1, 2}, "three"}, digest_of(4)}}));
  cases.push_back(make_case<Report>("report", {{7, {{1, 2}, "three"}, "commit: no space"}, {8, {}, ""}}));
  cases.push_back(make_case<GetLag>("get_lag", {{{1, 2}}}));
  cases.push_back(make_case<Lag>("lag", {{{{1, 4}, "five"}, 2, 3'000'000'000, 4, 5}}));
  cases.push_back(make_case<KeepAlive>("keep_alive", {{200}}));
  cases.push_back(make_case<RelayTo>("relay_to", {{0xFEDCBA9876543210, "node7:7071"}}));
  cases.push_back(make_case<Elsewhere>("elsewhere", {{{"node1:7071", ""}}, {}}));
  cases.push_back(make_case<Parents>("parents", {{{{1, "relay1:7070"}, {0xFEDCBA9876543210, ""}}, 5}, {{}, 0}}));
  cases.push_back(
      make_case<TrainerArrival>("trainer_arrival", {{digest_of(1), {{5, 6}, "step"}, digest_of(2), {7, 8, 9}}, {}}));
  cases.push_back(make_case<TrainerDelta>(
      "trainer_delta", {{digest_of(1), {{5, 6}, "step"}, {{5, 7}, ""}, digest_of(2), digest_of(3), 4, 500, 60}, {}}));
  cases.push_back(make_case<TrainerFrames>("trainer_frames", {{{7, 9}, blob_of(5, 1)}, {{0, 1}, {}}}));
  cases.push_back(make_case<TrainerParents>("parents", {{{{{1, "relay1:7070"}}, 7}}}));
  cases.push_back(make_case<GetLocal>("get_local", {{77}}));
  cases.push_back(make_case<Local>("local", {{"/run/user/1000/deltasync/agent.sock", 3, 1, 99}, {"", 0, 0, 0}}));
  cases.push_back(make_case<MapSegment>("map_segment", {{5, 0xFEDCBA9876543210, 3}}));
  cases.push_back(make_case<OpenUcx>("open_ucx", {{digest_of(2), 0x1'0016, {std::byte{7}, std::byte{0}}}}));
  cases.push_back(make_case<UcxOpened>("ucx_opened", {{{digest_of(3), 0x1'0016, {std::byte{9}}}}}));
  cases.push_back(make_case<TrainerHello>("trainer_hello", {{1, 2, 4, -5, "rank 2", layout_message()}}));
  cases.push_back(make_case<TrainerWelcome>("trainer_welcome", {{"job.g1", "/dev/shm", 1, {3, 4}, 5, 6}}));
  cases.push_back(make_case<TrainerPlan>("trainer_plan",
                                         {{{{0, 0, 0, 4, 8}, {999'999, 1u << 20, 3, 300, 1}}, 5'000, 1}, {{}, 0, 0}}));
  cases.push_back(make_case<TrainerNotify>("trainer_notify", {{2, 1}}));
  cases.push_back(make_case<TrainerWait>("trainer_wait", {{{3, 4}, 1000}}));
  cases.push_back(make_case<TrainerReady>("trainer_ready", {{{3, 4}, 5, 6, 7}}));
  cases.push_back(make_case<BucketHello>(
      "bucket_hello",
      {{5, 3, 4, 1u << 28, "rank 3", {{0, 2}, {7, 900'000}}, layout_message()}, {5, 0, 1, 1, "", {}, {}}}));
  cases.push_back(make_case<BucketBegin>("bucket_begin", {{{{1, 2}, "three"}}}));
  cases.push_back(make_case<BucketChunk>(
      "bucket_chunk", {{0, {{7, 0, 0}, {999'999, 0, 0}}, {1, 0xFEDCBA9876543210, 3}}, {1, {{5, 300, 4000}}, {9}}, {}}));
  cases.push_back(make_case<BucketHeld>("bucket_held", {{1ull << 40 | 5}}));
  cases.push_back(make_case<BucketFinish>("bucket_finish", {{90'000, 1ull << 40, digest_of(6)}}));
  return cases;
}

TEST(WireTypes, EachHasANameOfItsOwn) {
  std::set<std::string_view> names;
  std::size_t types = 0;
  for (std::uint16_t type = 0; type < 256; ++type) {
    const std::string_view name = to_string(static_cast<Type>(type));
    EXPECT_EQ(name.empty(), payload_bytes_max(type) == 0) << type;
    if (name.empty()) continue;
    names.insert(name);
    ++types;
  }
  EXPECT_EQ(names.size(), types);
  EXPECT_EQ(type_name(17), "extent");
  EXPECT_EQ(type_name(9), "9");
}

TEST(WireMessages, RoundTrip) {
  for (const Case& c : all_cases()) {
    for (const Bytes& sample : c.samples) {
      const auto again = c.reencode(sample);
      ASSERT_TRUE(again.ok()) << c.name << ": " << again.error().message();
      EXPECT_EQ(*again, sample) << c.name;
    }
  }
}

TEST(WireMessages, FieldsArriveWhereTheyBelong) {
  const PlanRequest plan{
      digest_of(1), {5, 6}, digest_of(2), WantKind::label, 9, "name", 30'000, 1, 0, digest_of(3), 1, 11};
  const auto got = PlanRequest::decode(plan.encode());
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->layout, plan.layout);
  EXPECT_EQ(got->base, plan.base);
  EXPECT_EQ(got->base_root, plan.base_root);
  EXPECT_EQ(got->want, plan.want);
  EXPECT_EQ(got->number, plan.number);
  EXPECT_EQ(got->label, plan.label);
  EXPECT_EQ(got->wait_ms, plan.wait_ms);
  EXPECT_EQ(got->partial, 1);
  EXPECT_EQ(got->full_only, 0);
  EXPECT_EQ(got->subscription, plan.subscription);
  EXPECT_EQ(got->compact, 1);
  EXPECT_EQ(got->epoch, 11u);

  const GetFrames frames{77, 2, {{0, 1}, {1, 2}, {500, 90'000'000'000}}};
  const auto got_frames = GetFrames::decode(frames.encode());
  ASSERT_TRUE(got_frames.ok());
  EXPECT_EQ(got_frames->ranges, frames.ranges);
  EXPECT_EQ(got_frames->step, 2u);
}

TEST(WireMessages, EveryTruncationAndExtensionIsRefused) {
  for (const Case& c : all_cases()) {
    for (const Bytes& sample : c.samples) {
      for (std::size_t n = 0; n < sample.size(); ++n) {
        const auto got = c.reencode(ByteSpan(sample).first(n));
        ASSERT_FALSE(got.ok()) << c.name << " cut to " << n << " of " << sample.size();
        EXPECT_EQ(got.error().code(), Errc::corrupt);
        EXPECT_THAT(got.error().message(), HasSubstr(c.name));
      }
      Bytes longer = sample;
      longer.push_back(std::byte{0});
      EXPECT_FALSE(c.reencode(longer).ok()) << c.name;
    }
  }
}

TEST(WireMessages, EveryBitFlipIsRefusedOrCanonical) {
  for (const Case& c : all_cases()) {
    for (const Bytes& sample : c.samples) {
      for (std::size_t bit = 0; bit < sample.size() * 8; ++bit) {
        Bytes flipped = sample;
        flipped[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
        const auto got = c.reencode(flipped);
        if (got.ok()) {
          EXPECT_EQ(*got, flipped) << c.name << " bit " << bit;
        }
      }
    }
  }
}

TEST(WireMessages, RandomBytesAreRefusedOrCanonical) {
  std::mt19937_64 random(20240611);
  for (const Case& c : all_cases()) {
    for (int round = 0; round < 2000; ++round) {
      Bytes bytes(random() % 160);
      for (auto& b : bytes) b = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
      const auto got = c.reencode(bytes);
      if (got.ok()) {
        EXPECT_EQ(*got, bytes) << c.name;
      }
    }
  }
}

TEST(WireMessages, FlagsAndEnumeratorsOutOfRangeAreNamed) {
  Bytes hello = Hello{}.encode();
  hello[2] = std::byte{2};
  EXPECT_EQ(Hello::decode(hello).error().message(), "hello: auth_required is 2");
  for (const int role : {0, 4, 255}) {
    Bytes auth = Auth{}.encode();
    auth[2] = static_cast<std::byte>(role);
    EXPECT_EQ(Auth::decode(auth).error().message(), "auth: role is " + std::to_string(role));
  }
  Bytes error = ErrorMessage{}.encode();
  error[0] = static_cast<std::byte>(static_cast<int>(Errc::internal) + 1);
  EXPECT_THAT(ErrorMessage::decode(error).error().message(), HasSubstr("error: code is"));
  Bytes plan = PlanRequest{}.encode();
  plan[plan.size() - sizeof(PlanRequest::epoch) - 1] = std::byte{2};
  EXPECT_EQ(PlanRequest::decode(plan).error().message(), "plan: compact is 2");
  Bytes reply = PlanReply{}.encode();
  reply[0] = std::byte{0};
  EXPECT_EQ(PlanReply::decode(reply).error().message(), "plan_reply: mode is 0");
}

TEST(WireMessages, WhatArrivesIsSaidWhereItDoes) {
  PlanRequest plan;
  const Bytes without = plan.encode();
  plan.arriving = 1;
  Bytes bytes = plan.encode();
  ASSERT_EQ(bytes.size(), without.size() + 1) << "who knows nothing of it hears nothing of it";
  EXPECT_EQ(PlanRequest::decode(without)->arriving, 0);
  EXPECT_EQ(PlanRequest::decode(bytes)->arriving, 1);
  for (const int value : {0, 2, 255}) {
    bytes.back() = static_cast<std::byte>(value);
    EXPECT_THAT(PlanRequest::decode(bytes).error().message(), HasSubstr("plan: arriving is"));
  }
  PlanReply reply;
  reply.steps.push_back({{7, 6}, {7, 7}, digest_of(8), 3, 4, 5});
  EXPECT_EQ(PlanReply::decode(reply.encode())->arriving, 0);
  reply.arriving = 1;
  bytes = reply.encode();
  EXPECT_EQ(PlanReply::decode(bytes)->arriving, 1);
  bytes.push_back(std::byte{1});
  EXPECT_FALSE(PlanReply::decode(bytes));
}

TEST(WireMessages, NothingArrivesWithoutAVersion) {
  TrainerArrival none;
  none.digests.push_back(1);
  EXPECT_THAT(TrainerArrival::decode(none.encode()).error().message(), HasSubstr("tile count is 1 of no version"));
}

TEST(WireMessages, EmptyMessagesHaveNoByte) {
  EXPECT_TRUE(Empty::decode({}).ok());
  EXPECT_FALSE(Empty::decode(blob_of(1, 0)).ok());
}

TEST(WireMessages, LongTextsAreCutBetweenCharacters) {
  ErrorMessage error;
  error.message = std::string(kErrorMessageBytesMax - 1, 'x') + "\xC3\xA9";  // the last character has two bytes
  const auto got = ErrorMessage::decode(error.encode());
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->message, std::string(kErrorMessageBytesMax - 1, 'x'));

  Auth auth;
  auth.name.assign(1000, 'n');
  EXPECT_EQ(Auth::decode(auth.encode())->name.size(), kPeerNameBytesMax);
}

TEST(WireMessages, LimitsAreKept) {
  PlanRequest plan;
  plan.label.assign(kLabelBytesMax, 'l');
  EXPECT_TRUE(PlanRequest::decode(plan.encode()).ok());
  plan.label.push_back('l');
  EXPECT_EQ(PlanRequest::decode(plan.encode()).error().message(), "plan: label is 128 bytes");
  plan.label = "a\x1b[2J";
  EXPECT_EQ(PlanRequest::decode(plan.encode()).error().message(), "plan: label is 'a\\x1b[2J', which is no plain text");
  EXPECT_FALSE(VersionReady::decode(VersionReady{{{1, 2}, "\xC2\x9B"}, digest_of(4)}.encode()).ok());

  PlanReply reply;
  reply.full_bytes = kModelBytesMax + 1;
  EXPECT_FALSE(PlanReply::decode(reply.encode()).ok());
  reply.full_bytes = kModelBytesMax;
  reply.steps.resize(kDeltaStepsMax);
  EXPECT_TRUE(PlanReply::decode(reply.encode()).ok());
  EXPECT_LE(reply.encode().size(), kControlBytesMax);
  reply.steps.resize(kDeltaStepsMax + 1);
  EXPECT_FALSE(PlanReply::decode(reply.encode()).ok());

  LayoutMessage layout = layout_message();
  layout.layout_raw_bytes = kLayoutRawBytesMax + 1;
  EXPECT_THAT(LayoutMessage::decode(layout.encode()).error().message(), HasSubstr("layout_raw_bytes"));

  TrainerPlan rects;
  rects.rects.push_back({static_cast<std::uint32_t>(kTensorsMax), 0, 0, 1, 1});
  EXPECT_THAT(TrainerPlan::decode(rects.encode()).error().message(), HasSubstr("tensor is 1000000"));
}

TEST(WireMessages, ExtentsAreNotEmpty) {
  EXPECT_TRUE(GetExtent::decode(GetExtent{1, {4, 5}}.encode()).ok());
  for (const TileRange& range : {TileRange{5, 5}, TileRange{5, 4}}) {
    EXPECT_EQ(GetExtent::decode(GetExtent{1, range}.encode()).error().message(), "get_extent: tiles is an empty range");
  }
}

TEST(WireMessages, CountsThatLieAllocateNothing) {
  // A count of 2^60 with no ranges behind it, for both varint lists and for the blob length of a layout.
  Bytes bytes;
  ByteWriter out(bytes);
  out.put<std::uint64_t>(1);
  out.put_varint(1ull << 60);
  EXPECT_FALSE(GetRawTiles::decode(bytes).ok());
  EXPECT_FALSE(TrainerPlan::decode(bytes).ok());

  Bytes layout;
  ByteWriter layout_out(layout);
  layout_out.put<std::uint64_t>(1);
  layout_out.put<std::uint64_t>(1);
  layout_out.put<std::uint64_t>(1ull << 60);
  EXPECT_FALSE(LayoutMessage::decode(layout).ok());
}

// ---- ranges --------------------------------------------------------------------------------------------------

Bytes raw_ranges(std::initializer_list<std::uint64_t> varints) {
  Bytes bytes;
  ByteWriter out(bytes);
  for (const auto v : varints) out.put_varint(v);
  return bytes;
}

TEST(WireRanges, RejectsEmptyAndOverflowing) {
  const std::uint64_t top = ~std::uint64_t{0};
  for (const Bytes& bytes : {raw_ranges({1, 5, 0}),          // empty range
                             raw_ranges({1, top, 1}),        // ends beyond 2^64
                             raw_ranges({2, 0, top, 1, 1}),  // the second begins beyond 2^64
                             raw_ranges({3, 0, 1, 0, 1}),    // one range too few
                             raw_ranges({1, 0})}) {          // no length
    ByteReader in(bytes);
    EXPECT_FALSE(get_ranges(in).ok());
    EXPECT_TRUE(in.failed());
  }
  const Bytes widest = raw_ranges({1, 0, top});
  ByteReader in(widest);
  ASSERT_TRUE(get_ranges(in).ok());
}

TEST(WireRanges, RandomListsSurvive) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<TileRange> ranges;
    std::uint64_t at = 0;
    for (std::size_t i = random() % 50; i > 0; --i) {
      const std::uint64_t first = at + random() % (1u << (random() % 20));
      const std::uint64_t end = first + 1 + random() % (1u << (random() % 20));
      ranges.push_back({first, end});
      at = end;
    }
    Bytes bytes;
    ByteWriter out(bytes);
    put_ranges(out, ranges);
    ByteReader in(bytes);
    const auto got = get_ranges(in);
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(*got, ranges);
    EXPECT_EQ(in.remaining(), 0u);
  }
}

TEST(WireRangesDeathTest, UnsortedListsAreTheCallersMistake) {
  Bytes bytes;
  ByteWriter out(bytes);
  EXPECT_DEATH(put_ranges(out, {{4, 5}, {3, 4}}), "not sorted");
  EXPECT_DEATH(put_ranges(out, {{4, 4}}), "non-empty");
}

// ---- headers -------------------------------------------------------------------------------------------------

Header rehash(Header header) {
  header.header_hash = xxh3_64(bytes_of(header).first(offsetof(Header, header_hash)));
  return header;
}

TEST(WireHeader, KnownBytes) {
  const Bytes payload = blob_of(3, 65);
  const Header header = make_header(Type::plan, 0x0102030405060708, payload);
  EXPECT_TRUE(check_header(header).ok());
  EXPECT_EQ(std::memcmp(&header, "DSW1", 4), 0);
  EXPECT_EQ(header.type, 12);
  EXPECT_EQ(header.payload_bytes, 3u);
  EXPECT_EQ(header.payload_hash, xxh3_64(payload));
  EXPECT_NE(header.payload_hash, 0u);

  const Header extent = make_header(Type::extent, 1, {}, kExtentBytesMax);
  EXPECT_EQ(extent.payload_bytes, kExtentBytesMax);
  EXPECT_EQ(extent.payload_hash, 0u);
  EXPECT_TRUE(check_header(extent).ok());
}

TEST(WireHeader, EveryBitFlipIsRefused) {
  const Header good = make_header(Type::frame, 42, blob_of(100, 3));
  for (std::size_t bit = 0; bit < sizeof(Header) * 8; ++bit) {
    Header bad = good;
    reinterpret_cast<std::uint8_t*>(&bad)[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    const Status status = check_header(bad);
    ASSERT_FALSE(status.ok()) << "bit " << bit;
    EXPECT_EQ(status.error().code(), bit < 32 ? Errc::protocol : Errc::corrupt) << "bit " << bit;
  }
}

TEST(WireHeader, LengthsBeyondTheLimitOfTheTypeAreRefused) {
  for (unsigned type = 0; type < 200; ++type) {
    Header header = make_header(Type::hello, 1, {});
    header.type = static_cast<std::uint16_t>(type);
    header.payload_hash = 0;
    const std::uint64_t bytes_max = payload_bytes_max(header.type);
    header.payload_bytes = bytes_max;
    const Status at_limit = check_header(rehash(header));
    if (bytes_max == 0) {
      ASSERT_FALSE(at_limit.ok());
      EXPECT_THAT(at_limit.error().message(), HasSubstr("unknown type"));
      continue;
    }
    EXPECT_TRUE(at_limit.ok()) << type;
    header.payload_bytes = bytes_max + 1;
    EXPECT_FALSE(check_header(rehash(header)).ok()) << type;
    header.payload_bytes = ~std::uint64_t{0};
    EXPECT_FALSE(check_header(rehash(header)).ok()) << type;
  }
}

TEST(WireHeader, ReservedFieldsAreZero) {
  Header header = make_header(Type::hello, 1, {});
  header.flags = 1;
  EXPECT_EQ(check_header(rehash(header)).error().code(), Errc::protocol);
  header.flags = 0;
  header.reserved = 1;
  EXPECT_EQ(check_header(rehash(header)).error().code(), Errc::protocol);
  Header extent = make_header(Type::extent, 1, {}, 10);
  extent.payload_hash = 1;
  EXPECT_EQ(check_header(rehash(extent)).error().code(), Errc::protocol);
}

TEST(WireHeader, EveryTypeHasALimit) {
  for (const auto type :
       {1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 40, 41, 42, 43, 44, 45, 46}) {
    EXPECT_GT(payload_bytes_max(static_cast<std::uint16_t>(type)), 0u) << type;
  }
  for (const auto reserved : {60, 61, 62, 63}) {
    EXPECT_EQ(payload_bytes_max(static_cast<std::uint16_t>(reserved)), 0u) << reserved;
  }
}

/// wire_protocol.md, "Protocol 4 and 5".
TEST(WireProtocols, TrainersOfProtocol4KnowNoEpochsNoInstanceAndNoPlansOfBefore) {
  const TrainerWelcome welcome{"job.g1", "/dev/shm", 1, {3, 4}, 5, 6};
  EXPECT_EQ(welcome.encode(4).size() + 2 * sizeof(std::uint64_t), welcome.encode(5).size());
  EXPECT_FALSE(TrainerWelcome::decode(welcome.encode(5), 4).ok());
  const auto old = TrainerWelcome::decode(welcome.encode(4), 4);
  ASSERT_TRUE(old.ok());
  EXPECT_EQ(old->epoch, 0u);
  EXPECT_EQ(old->instance, 0u);
  const TrainerPlan plan{{{0, 0, 0, 4, 8}}, 5'000, 1};
  EXPECT_EQ(plan.encode(4).size() + 1, plan.encode(5).size());
  const auto fresh = TrainerPlan::decode(plan.encode(4), 4);
  ASSERT_TRUE(fresh.ok());
  EXPECT_EQ(fresh->agreed, 0u);
}

}  // namespace
}  // namespace deltasync::wire
