// What a connection makes of the bytes that come, however they are cut.
#include "format/message.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/hash.hpp"

namespace deltasync::wire {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kAllowed = 1u << 20;

/// What a parser made of some bytes: nothing but `wanted` if they are not all of a message.
struct Made {
  std::optional<Message> message;
  std::string error;
  Errc code = Errc::internal;
  std::size_t used = 0;
  std::size_t wanted = 0;  ///< how many the parser has room for when the bytes end
};

Made parse(ByteSpan bytes, std::size_t first_piece, std::size_t piece, std::uint64_t allowed = kAllowed) {
  MessageParser parser;
  Made made;
  bool asked = false;
  std::size_t most = first_piece;
  for (;;) {
    const MutByteSpan to = parser.next();
    if (to.empty() && asked) {
      made.message = std::move(parser).take();
      return made;
    }
    Status status;
    if (to.empty()) {
      status = parser.allow_payload(allowed);
      asked = true;
    } else if (made.used == bytes.size()) {
      made.wanted = to.size();
      return made;
    } else {
      const std::size_t n = std::min({to.size(), bytes.size() - made.used, most});
      std::memcpy(to.data(), bytes.data() + made.used, n);
      made.used += n;
      most -= n;
      if (most == 0) most = piece;
      status = parser.took(n);
    }
    if (!status) {
      made.error = status.error().message();
      made.code = status.error().code();
      return made;
    }
  }
}

Made parse(ByteSpan bytes, std::uint64_t allowed = kAllowed) {
  return parse(bytes, ~std::size_t{0}, ~std::size_t{0}, allowed);
}

Bytes payload_of(std::size_t bytes) {
  Bytes payload(bytes);
  for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::byte>(i * 7 + 1);
  return payload;
}

Bytes joined(const Header& header, ByteSpan payload) {
  Bytes bytes(bytes_of(header).begin(), bytes_of(header).end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

Header signed_again(Header header) {
  header.header_hash = xxh3_64(bytes_of(header).first(offsetof(Header, header_hash)));
  return header;
}

TEST(MessageParser, EverySplitMakesTheSameMessage) {
  for (const std::size_t size : {0, 1, 7, 100}) {
    const Bytes payload = payload_of(size);
    Bytes bytes = joined(make_header(Type::plan, 42, payload), payload);
    const std::size_t whole = bytes.size();
    bytes.push_back(std::byte{'D'});  // of the next message
    for (std::size_t first = 1; first <= whole; ++first) {
      for (const std::size_t piece : {std::size_t{1}, std::size_t{5}, whole}) {
        const Made made = parse(bytes, first, piece);
        ASSERT_TRUE(made.message) << first << ", then " << piece << ": " << made.error;
        EXPECT_EQ(made.used, whole);
        EXPECT_EQ(made.message->type(), Type::plan);
        EXPECT_EQ(made.message->header.request, 42u);
        EXPECT_EQ(made.message->payload, payload);
      }
    }
  }
}

TEST(MessageParser, ACutMessageWantsTheRest) {
  const Bytes payload = payload_of(100);
  const Bytes bytes = joined(make_header(Type::plan, 42, payload), payload);
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    const Made made = parse(ByteSpan(bytes).first(cut));
    EXPECT_FALSE(made.message) << cut;
    EXPECT_EQ(made.error, "") << cut;
    EXPECT_EQ(made.wanted, (cut < sizeof(Header) ? sizeof(Header) : bytes.size()) - cut);
  }
}

TEST(MessageParser, ReadsNoPayloadUntilItIsAllowed) {
  const Header header = make_header(Type::plan, 42, payload_of(100));
  MessageParser parser;
  std::memcpy(parser.next().data(), &header, sizeof header);
  ASSERT_TRUE(parser.took(sizeof header));
  EXPECT_TRUE(parser.next().empty());
  EXPECT_EQ(parser.header().payload_bytes, 100u);
  ASSERT_TRUE(parser.allow_payload(100));
  EXPECT_EQ(parser.next().size(), 100u);
}

TEST(MessageParser, GoesOnAfterACheckedHeader) {
  const Bytes payload = payload_of(100);
  MessageParser parser(make_header(Type::plan, 42, payload));
  ASSERT_TRUE(parser.allow_payload(100));
  std::memcpy(parser.next().data(), payload.data(), 100);
  ASSERT_TRUE(parser.took(100));
  EXPECT_TRUE(parser.next().empty());
  EXPECT_EQ(std::move(parser).take().payload, payload);
}

TEST(MessageParser, RoomGrowsWithWhatArrives) {
  const Bytes payload = payload_of(2 * kPayloadStepBytes + 3);
  MessageParser parser(make_header(Type::frame, 1, payload));
  ASSERT_TRUE(parser.allow_payload(payload.size()));
  std::size_t at = 0;
  for (const std::size_t step : {kPayloadStepBytes, kPayloadStepBytes, std::size_t{3}}) {
    ASSERT_EQ(parser.next().size(), step);
    std::memcpy(parser.next().data(), payload.data() + at, 1);  // asking again costs nothing
    ASSERT_TRUE(parser.took(1));
    ASSERT_EQ(parser.next().size(), step - 1);
    std::memcpy(parser.next().data(), payload.data() + at + 1, step - 1);
    ASSERT_TRUE(parser.took(step - 1));
    at += step;
  }
  EXPECT_TRUE(parser.next().empty());
  EXPECT_EQ(std::move(parser).take().payload, payload);
}

TEST(MessageParser, AnExtentHasNoHash) {
  const Bytes payload = payload_of(100);
  const Made made = parse(joined(make_header(Type::extent, 1, {}, payload.size()), payload));
  ASSERT_TRUE(made.message) << made.error;
  EXPECT_EQ(made.message->payload, payload);
}

struct Malformed {
  const char* what;
  Bytes bytes;
  std::size_t used;  ///< when it is refused
  Errc code;
  std::string error;
  std::uint64_t allowed = kAllowed;
};

Malformed header_with(const char* what, void (*change)(Header&), Errc code, std::string error) {
  Header header = make_header(Type::plan, 1, {});
  change(header);
  return {what, joined(signed_again(header), payload_of(9)), sizeof(Header), code, std::move(error)};
}

std::vector<Malformed> malformed() {
  const Bytes payload = payload_of(100);
  const Header good = make_header(Type::plan, 1, payload);
  Header damaged = good;
  damaged.request ^= 1;
  Bytes tls(100);
  tls[0] = std::byte{22};
  tls[1] = std::byte{3};
  Bytes other = payload;
  other[99] ^= std::byte{1};
  Header empty = make_header(Type::end, 1, {});
  empty.payload_hash ^= 1;
  return {
      {"garbage", Bytes(100, std::byte{'G'}), 48, Errc::protocol, "message header: not the magic of this protocol"},
      {"TLS", tls, 48, Errc::unsupported,
       "the peer speaks TLS, and this side does not: give this side a certificate (--tls-cert, --tls-key), or the peer "
       "no --tls-ca"},
      {"damaged header", joined(damaged, payload), 48, Errc::corrupt, "message header: its hash differs"},
      header_with(
          "flags", [](Header& h) { h.flags = 1; }, Errc::protocol, "message header: reserved fields are not zero"),
      header_with(
          "reserved", [](Header& h) { h.reserved = 1; }, Errc::protocol,
          "message header: reserved fields are not zero"),
      header_with(
          "type", [](Header& h) { h.type = 999; }, Errc::protocol, "message of type 999: unknown type"),
      header_with(
          "length", [](Header& h) { h.payload_bytes = ~std::uint64_t{0}; }, Errc::protocol,
          "message of type plan: claims 18446744073709551615 bytes, the limit is 1048576"),
      header_with(
          "hash of an extent",
          [](Header& h) {
            h.type = static_cast<std::uint16_t>(Type::extent);
            h.payload_hash = 1;
          },
          Errc::protocol, "message of type extent: an extent has no payload hash"),
      {"more than allowed", joined(good, payload), 48, Errc::protocol,
       "a message of type plan claims 100 bytes where 99 are allowed", 99},
      {"damaged payload", joined(good, other), 148, Errc::corrupt, "payload hash of a message of type plan"},
      {"hash of nothing", joined(signed_again(empty), {}), 48, Errc::corrupt, "payload hash of a message of type end"},
  };
}

TEST(MessageParser, WhatIsMalformedIsRefusedAsSoonAsItCanBeSeenInEverySplit) {
  for (const Malformed& m : malformed()) {
    for (std::size_t first = 1; first <= m.bytes.size(); ++first) {
      for (const std::size_t piece : {std::size_t{1}, m.bytes.size()}) {
        const Made made = parse(m.bytes, first, piece, m.allowed);
        ASSERT_EQ(made.error, m.error) << m.what << ": " << first << ", then " << piece;
        EXPECT_EQ(made.code, m.code) << m.what;
        EXPECT_EQ(made.used, m.used) << m.what;
      }
    }
    for (std::size_t cut = 0; cut < m.used; ++cut) {
      const Made made = parse(ByteSpan(m.bytes).first(cut), m.allowed);
      EXPECT_EQ(made.error, "") << m.what << " cut at " << cut;
      EXPECT_GT(made.wanted, 0u) << m.what << " cut at " << cut;
    }
  }
}

TEST(MessageParser, EveryFlippedBitOfAHeaderIsRefusedByIt) {
  const Bytes good = joined(make_header(Type::plan, 7, payload_of(5)), payload_of(5));
  for (std::size_t bit = 0; bit < sizeof(Header) * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    const Made made = parse(bad);
    EXPECT_NE(made.error, "") << bit;
    EXPECT_EQ(made.used, sizeof(Header)) << bit;
  }
}

}  // namespace
}  // namespace deltasync::wire
