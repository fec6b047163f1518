// What votes come to, and what is in the registers.
#include "commit/votes.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace deltasync::commit {
namespace {

Vote yes(std::string subject = "v7", std::string lacks = "") {
  return {{}, std::move(subject), "", std::move(lacks)};
}
Vote no(std::string reason, std::string doubt = "") {
  return {std::move(reason), "v7", std::move(doubt), ""};
}

TEST(Votes, AreWrittenAsThePageSays) {
  EXPECT_EQ(encode(Vote{"rank 1: disk full", "v7", "w is void", "1f"}),
            R"({"doubt":"w is void","lacks":"1f","reason":"rank 1: disk full","subject":"v7"})");
  EXPECT_EQ(encode(yes()), R"({"doubt":"","lacks":"","reason":null,"subject":"v7"})");
  EXPECT_EQ(encode(Verdict{Outcome::no, "rank 1: disk full", "w is void"}),
            R"({"doubt":"w is void","reason":"rank 1: disk full"})");
}

TEST(Votes, ComeBackAsTheyWere) {
  const auto vote = decode_vote(encode(Vote{"\"quoted\"\n", "v\xc3\xa9", "d", "0f"}));
  ASSERT_TRUE(vote.ok());
  EXPECT_EQ(vote->reason, "\"quoted\"\n");
  EXPECT_EQ(vote->subject, "v\xc3\xa9");
  EXPECT_EQ(vote->doubt, "d");
  EXPECT_EQ(vote->lacks, "0f");
  EXPECT_FALSE(decode_vote(encode(yes()))->reason);
  for (const Verdict& verdict : {Verdict{Outcome::no, "because", "d"}, Verdict{Outcome::yes, "", "d"}}) {
    EXPECT_EQ(*decode_verdict(encode(verdict)), verdict);
  }
  EXPECT_EQ(decode_vote(encode(no("\xff")))->reason, "\xef\xbf\xbd");  // text that is no UTF-8
}

TEST(Votes, WhatIsLeftOutIsEmpty) {
  EXPECT_TRUE(decode_vote(R"({"reason": null})").ok());
  EXPECT_EQ(decode_verdict(R"({"reason": ""})")->outcome, Outcome::yes);
}

TEST(Votes, WhatIsNoVoteIsRefused) {
  for (const char* text : {"", "null", "[]", "{", "{}", R"({"subject": "v7"})", R"({"reason": 1})",
                           R"({"reason": null, "subject": 7})", R"({"reason": null, "lacks": "g"})",
                           R"({"reason": null, "lacks": "F"})", R"({"reason": null, "doubt": null})"}) {
    const auto vote = decode_vote(text);
    ASSERT_FALSE(vote.ok()) << text;
    EXPECT_EQ(vote.error().code(), Errc::corrupt);
  }
  for (const char* text : {"", "7", "{}", R"({"reason": null})", R"({"reason": "", "doubt": 1})"}) {
    EXPECT_FALSE(decode_verdict(text).ok()) << text;
  }
}

TEST(Votes, AllYesIsNoObjection) {
  const Tally tally = count({yes(), yes(), yes()});
  EXPECT_EQ(tally.objection, "");
  EXPECT_EQ(tally.lacking, "");
}

TEST(Votes, ReasonsAreListedBeforeAllElse) {
  EXPECT_EQ(count({no("rank 0: a"), yes("v6"), no("rank 2: b")}).objection, "rank 0: a; rank 2: b");
}

TEST(Votes, AboutDifferentThingsNameThem) {
  EXPECT_EQ(count({yes("v6"), yes("v7"), yes("v6")}).objection,
            "the ranks do not speak of the same: v6 on rank 2, v7 on rank 1");
}

TEST(Votes, OnlyWhatAllLackIsLacking) {
  EXPECT_EQ(count({yes("v7", "c"), yes("v7", "a")}).lacking, "8");
  EXPECT_EQ(count({yes("v7", "c"), yes("v7", "3")}).lacking, "");
  EXPECT_EQ(count({yes("v7", "ff"), yes("v7", "")}).lacking, "");
  EXPECT_EQ(count({yes("v7", "f0"), no("no room")}).lacking, "");
  EXPECT_EQ(count({yes("v7", "f0")}).lacking, "f0");
}

TEST(Votes, BitsAreCountedFromTheEnd) {
  EXPECT_EQ(common_bits("f0f", "ff"), "f");
  EXPECT_EQ(common_bits("1f00", "3100"), "1100");
  EXPECT_EQ(common_bits("00f", "f"), "f");
  EXPECT_EQ(common_bits("0", "f"), "");
  const std::string many(25'000, 'f');
  EXPECT_EQ(common_bits(many, many), many);
}

TEST(Votes, DoubtsAreListed) {
  EXPECT_EQ(doubts_of({no("", "a"), yes(), no("", "b")}), "a; b");
  EXPECT_EQ(name_ranks({2}), "rank 2");
  EXPECT_EQ(name_ranks({0, 2}), "ranks 0, 2");
}

}  // namespace
}  // namespace deltasync::commit
