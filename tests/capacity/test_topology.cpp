#include "capacity/topology.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <string>

namespace deltasync::capacity {
namespace {

using testing::HasSubstr;

constexpr const char* kSmall = R"([model]
parameters = 8e9
[trainers]
cores = 32
[[engines]]
cores = 16
)";

std::string refusal(const std::string& text) {
  const auto parsed = parse_topology(text, "t.toml");
  if (parsed) return "";
  EXPECT_EQ(parsed.error().code(), Errc::invalid_argument);
  return parsed.error().message();
}

TEST(Topology, WhatIsNotSaid) {
  const auto fleet = parse_topology(kSmall, "t.toml");
  ASSERT_TRUE(fleet) << fleet.error().to_string();
  EXPECT_EQ(fleet->model.bytes(), 16e9);
  EXPECT_EQ(fleet->model.changed, 0.01);
  ASSERT_EQ(fleet->groups.size(), 2U);
  EXPECT_EQ(fleet->groups[1].name, "engines");
  EXPECT_EQ(fleet->groups[1].count, 1U);
  EXPECT_EQ(fleet->groups[1].link, 0);
  EXPECT_TRUE(fleet->is_engine(1));
}

TEST(Topology, AllThatCanBeSaid) {
  const auto fleet = parse_topology(R"(
mtu = 9000
model = { parameters = 1e12, bytes_per_parameter = 1, changed = 1, bits_per_change = 9.5 }
links = { wan = "1gbit" }
processors = { lab = 2 }
[trainers]
count = 4
link = "100gbit"
processor = "lab"
[[relays]]
name = "near"
count = 2
cores = 8
memory_gbps = 200
[[relays]]
name = "far"
through = "wan"
cores = 8
delay_ms = 20.5
[[engines]]
name = "here"
from = "near"
cores = 8
[[engines]]
name = "there"
count = 7
hosts = 2
cores = 8
slower = 0.25
)",
                                    "t.toml");
  ASSERT_TRUE(fleet) << fleet.error().to_string();
  EXPECT_EQ(fleet->relay_groups, 2U);
  EXPECT_EQ(fleet->groups[0].link, 12.5e9);
  EXPECT_EQ(fleet->groups[1].from, 0U);
  EXPECT_EQ(fleet->groups[2].from, 1U);
  EXPECT_EQ(fleet->groups[2].through, "wan");
  EXPECT_EQ(fleet->groups[2].delay_ms, 20.5);
  EXPECT_EQ(fleet->groups[3].from, 1U);
  EXPECT_EQ(fleet->groups[4].from, 2U);  // the last relays
  EXPECT_EQ(fleet->groups[4].hosts, 2U);
  EXPECT_EQ(fleet->links.at("wan"), 125e6);
}

TEST(Topology, AnErrorHasItsLineAndTheRemedy) {
  const std::string small = kSmall;
  EXPECT_THAT(refusal("[model\n"), HasSubstr("t.toml:1: "));
  EXPECT_THAT(refusal("[model]\nparameter = 1\n"), HasSubstr("'parameters' is missing"));
  EXPECT_EQ(refusal("[model]\nparameters = 1\nsize = 2\n"),
            "t.toml:3: model: no key 'size'; there are parameters, bytes_per_parameter, changed, bits_per_change");
  EXPECT_EQ(refusal("[model]\nparameters = 1\nchanged = 1.5\n"),
            "t.toml:3: model: changed: a number from 1e-09 to 1 is wanted");
  EXPECT_EQ(refusal("[model]\nparameters = \"8B\"\n"),
            "t.toml:2: model: parameters: a number from 1 to 1e+15 is wanted");
  EXPECT_THAT(refusal("[model]\nparameters = 1\n"), HasSubstr("[trainers] is missing"));
  EXPECT_THAT(refusal("model = 8\n"), HasSubstr("t.toml:1: model: a table is wanted; write [model]"));
  EXPECT_THAT(refusal("[model]\nparameters = 1\n[trainers]\n"), HasSubstr("t.toml:3: trainers: 'cores' is missing"));
  EXPECT_THAT(refusal("[model]\nparameters = 1\n[trainers]\ncores = 1\n"), HasSubstr("[[engines]] is missing"));
  EXPECT_THAT(refusal("[model]\nparameters = 1\n[trainers]\ncores = 1\n[engines]\ncores = 1\n"),
              HasSubstr("t.toml:5: engines: tables are wanted; write [[engines]]"));
  EXPECT_EQ(refusal(small + "link = \"fast\"\n"),
            "t.toml:7: engines: link: 'fast' is no rate; write \"100gbit\", or kbit, mbit, tbit");
  EXPECT_EQ(refusal(small + "link = 100\n"),
            "t.toml:7: engines: link: 'a number without its unit' is no rate; write \"100gbit\", or kbit, mbit, tbit");
  EXPECT_EQ(refusal(small + "name = \"\"\n"), "t.toml:7: engines: name: it is empty");
  EXPECT_EQ(refusal(small + "count = 20000\nhosts = 64\n"), "t.toml:8: engines: hosts: a number from 1 to 5 is wanted");
  EXPECT_EQ(refusal(small + "count = 0\n"), "t.toml:7: engines: count: a number from 1 to 100000 is wanted");
  EXPECT_EQ(refusal(small + "count = 1.5\n"), "t.toml:7: engines: count: a whole number is wanted");
  EXPECT_EQ(refusal(small + "from = \"relays\"\n"),
            "t.toml:7: engines: from: nobody before this is called 'relays'; there are trainers");
  EXPECT_EQ(refusal(small + "through = \"wan\"\n"), "t.toml:7: engines: through: no 'wan' in [links]; there are none");
  EXPECT_EQ(refusal("processors = { lab = 2 }\n" + small + "processor = \"lab\"\n"),
            "t.toml:8: engines: cores and processor exclude each other");
  EXPECT_EQ(refusal(small + "[[engines]]\ncores = 1\n"),
            "t.toml:7: engines: there are 'engines' already; give this group a name of its own");
  EXPECT_THAT(refusal(small + "[relay]\n"), HasSubstr("t.toml:7: no key 'relay'; there are mtu, model, links"));
}

TEST(Topology, Rates) {
  EXPECT_EQ(*parse_rate("1gbit"), 125e6);
  EXPECT_EQ(*parse_rate("1.5mbit"), 187.5e3);
  EXPECT_EQ(*parse_rate("64kbit"), 8e3);
  for (const char* bad : {"", "gbit", "1", "1gb", "1gbit ", "-1gbit", "0gbit", "nangbit", "infgbit"}) {
    EXPECT_FALSE(parse_rate(bad)) << bad;
  }
}

}  // namespace
}  // namespace deltasync::capacity
