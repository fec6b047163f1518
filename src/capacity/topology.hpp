// A fleet that is planned: which hosts there are, who takes a version from whom, and over which links. In TOML:
//
//   mtu = 1500                 # of all links
//   [model]
//   parameters = 8e9
//   bytes_per_parameter = 2
//   changed = 0.01             # of the parameters, in a step; 1: each engine takes the whole model, as at its start
//   bits_per_change = 10.7     # on the wire; or from the benchmarks
//   [links]                    # that several hosts share, such as the line between two sites
//   wan = "1gbit"
//   [processors]               # that several hosts share, such as the machine of a lab; cores
//   lab = 2
//   [trainers]
//   count = 4                  # hosts, each with its part of the model
//   link = "100gbit"           # of each, in both directions
//   cores = 32                 # of each; or processor = "lab"
//   memory_gbps = 200          # of each, gigabytes a second
//   delay_ms = 0               # of each frame, one way
//   slower = 0                 # a host's processor is slower by up to this part, as the seed says
//   [[relays]]                 # each takes the whole model and serves it on; as above, and
//   name = "site"              # of a second group
//   from = "trainers"          # or the name of relays before it; without: the last relays before it
//   through = "wan"            # a shared link on the way from there
//   [[engines]]
//   count = 100
//   hosts = 1                  # of an engine; each takes its share of the model
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync::capacity {

struct Model {
  double parameters = 0;
  double bytes_per_parameter = 2;
  double changed = 0.01;       ///< fraction; 1: whole models
  double bits_per_change = 0;  ///< 0: from the rates

  double bytes() const { return parameters * bytes_per_parameter; }
};

/// Hosts that are alike.
struct Group {
  std::string name;
  std::uint32_t count = 1;
  std::uint32_t from = 0;  ///< number of the group that it takes from; of trainers: its own
  double link = 0;         ///< bytes a second each way; 0: no limit
  double cores = 0;        ///< of each host; 0: `processor` has them
  std::string processor;   ///< one of Topology::processors
  std::string through;     ///< one of Topology::links; empty: none
  double memory_gbps = 0;  ///< 0: no limit
  double delay_ms = 0;
  double slower = 0;
  std::uint32_t hosts = 1;  ///< of an engine; of others 1
};

struct Topology {
  Model model;
  double mtu = 1500;
  std::map<std::string, double> links;       ///< bytes a second
  std::map<std::string, double> processors;  ///< cores
  std::vector<Group> groups;                 ///< trainers, then relays, each after what it takes from, then engines
  std::uint32_t relay_groups = 0;

  bool is_engine(std::size_t group) const { return group > relay_groups; }
};

/// `name` stands before errors, with the line.
///   - Errc::invalid_argument: it is no TOML, or something in it is wrong; says what is possible.
Result<Topology> parse_topology(std::string_view text, std::string_view name);

/// "100gbit", "1.5mbit", "64kbit": bytes a second. invalid_argument.
Result<double> parse_rate(std::string_view text);

}  // namespace deltasync::capacity
