#include <gtest/gtest.h>

#include "agent/serve/admission.hpp"

namespace deltasync::agent {
namespace {

using boost::asio::ip::address;
using boost::asio::ip::make_address;
using Kind = Admission::Kind;
using Verdict = Admission::Verdict;

AdmissionLimits small() {
  AdmissionLimits limits;
  limits.receivers_max = 2;
  limits.data_max = 1;
  limits.strangers_max = 4;
  limits.strangers_per_address = 3;
  limits.strangers_per_loopback = 4;
  return limits;
}

TEST(Admission, StrangersTakeNoPlaceOfThoseWhoAreKnown) {
  Admission admission(small());
  std::uint64_t id = 0;
  for (int i = 0; i < 100; ++i) admission.come(++id, make_address("10.0.0.1"));
  EXPECT_EQ(admission.count(Kind::stranger), 3u);
  admission.come(++id, make_address("10.0.0.2"));
  EXPECT_EQ(admission.settle(id, Kind::receiver), Verdict::admitted);
  EXPECT_EQ(admission.count(Kind::stranger), 3u);
  EXPECT_EQ(admission.count(Kind::receiver), 1u);
}

TEST(Admission, TheOldestOfAnAddressLeavesForItsNext) {
  Admission admission(small());
  for (std::uint64_t id = 1; id <= 3; ++id) EXPECT_EQ(admission.come(id, make_address("10.0.0.1")), std::nullopt);
  EXPECT_EQ(admission.come(4, make_address("10.0.0.1")), 1u);
  EXPECT_EQ(admission.come(5, make_address("10.0.0.1")), 2u);
  EXPECT_EQ(admission.settle(1, Kind::receiver), Verdict::left);
  EXPECT_EQ(admission.settle(3, Kind::receiver), Verdict::admitted);
}

TEST(Admission, WhoIsAloneAtAnAddressOutlastsAFloodFromOthers) {
  Admission admission(small());
  admission.come(1, make_address("10.0.0.9"));
  std::uint64_t id = 1;
  for (int i = 0; i < 100; ++i) {
    admission.come(++id, make_address("10.0.0.1"));
    admission.come(++id, make_address("10.0.0.2"));
  }
  EXPECT_LE(admission.count(Kind::stranger), 4u);
  EXPECT_EQ(admission.settle(1, Kind::receiver), Verdict::admitted);
}

TEST(Admission, LoopbackMayHaveMore) {
  Admission admission(small());
  for (std::uint64_t id = 1; id <= 4; ++id) EXPECT_EQ(admission.come(id, make_address("127.0.0.1")), std::nullopt);
  EXPECT_EQ(admission.come(5, make_address("::ffff:127.0.0.1")), 1u) << "the same address";
}

TEST(Admission, ASlash64IsOneAddress) {
  Admission admission(small());
  for (std::uint64_t id = 1; id <= 3; ++id) admission.come(id, make_address("2001:db8::" + std::to_string(id)));
  EXPECT_EQ(admission.come(4, make_address("2001:db8::ffff")), 1u);
  EXPECT_EQ(admission.come(5, make_address("2001:db8:0:1::1")), std::nullopt);
}

TEST(Admission, EachKindHasItsOwnPlaces) {
  Admission admission(small());
  const address here = make_address("10.0.0.1");
  for (std::uint64_t id = 1; id <= 2; ++id) {
    admission.come(id, here);
    ASSERT_EQ(admission.settle(id, Kind::receiver), Verdict::admitted);
  }
  admission.come(3, here);
  EXPECT_EQ(admission.settle(3, Kind::receiver), Verdict::busy);
  EXPECT_EQ(admission.count(Kind::stranger), 1u) << "until it leaves";
  EXPECT_EQ(admission.settle(3, Kind::data), Verdict::admitted) << "receivers can still pull";
  admission.leave(1);
  admission.come(4, here);
  EXPECT_EQ(admission.settle(4, Kind::receiver), Verdict::admitted);
}

TEST(Admission, NothingIsLeftOfThoseWhoLeft) {
  Admission admission(small());
  for (std::uint64_t id = 1; id <= 50; ++id) {
    if (const auto leaves = admission.come(id, make_address("10.0." + std::to_string(id % 7) + ".1"))) {
      admission.leave(*leaves);  // its connection ends later
    }
    if (id % 3 == 0) admission.settle(id, id % 2 == 0 ? Kind::data : Kind::receiver);
  }
  for (std::uint64_t id = 1; id <= 50; ++id) admission.leave(id);
  EXPECT_EQ(admission.count(Kind::stranger), 0u);
  EXPECT_EQ(admission.count(Kind::receiver), 0u);
  EXPECT_EQ(admission.count(Kind::data), 0u);
}

}  // namespace
}  // namespace deltasync::agent
