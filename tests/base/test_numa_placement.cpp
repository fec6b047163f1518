// Where threads and memory go, on machines that are made up; what is asked for on this one really happens.
#include "base/numa_placement.hpp"

#include <gmock/gmock-more-matchers.h>
#include <sched.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <set>
#include <sstream>
#include <thread>

#include "base/log.hpp"
#include "tests/support/fake_numa.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync {
namespace {

using test::FakeNuma;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

NumaPlacementPtr made(const NumaPlacementRequest& request, NumaSystem& system) {
  auto numa_placement = NumaPlacement::make(request, system);
  EXPECT_TRUE(numa_placement) << numa_placement.error().to_string();
  return numa_placement ? *numa_placement : nullptr;
}

void expect_refused(const NumaPlacementRequest& request, NumaSystem& system, const std::string& words) {
  const auto numa_placement = NumaPlacement::make(request, system);
  ASSERT_FALSE(numa_placement) << "expected: " << words;
  EXPECT_EQ(numa_placement.error().code(), Errc::invalid_argument);
  EXPECT_THAT(numa_placement.error().message(), HasSubstr(words));
}

// ---- lists -------------------------------------------------------------------------------------------------------

TEST(CpuLists, AreReadAndWrittenAsLinuxDoes) {
  EXPECT_THAT(parse_cpu_list("0").value(), ElementsAre(0));
  EXPECT_THAT(parse_cpu_list("0-3,16").value(), ElementsAre(0, 1, 2, 3, 16));
  EXPECT_THAT(parse_cpu_list("7,2-3,3,2-2").value(), ElementsAre(2, 3, 7));
  EXPECT_EQ(parse_cpu_list("0-8191").value().size(), kCpusMax);
  EXPECT_EQ(to_string(parse_cpu_list("5,7,3,2,4").value()), "2-5,7");
  EXPECT_EQ(to_string(CpuList()), "");
}

TEST(CpuLists, WhatIsNoneIsRefused) {
  for (const char* text : {"", ",", "0,", ",0", "-", "0-", "-1", "3-2", "a", "0x1", "0 1", " 0", "0-3:1", "8192", "+1",
                           "99999999999999999999", "0-99999999999"}) {
    const auto list = parse_cpu_list(text);
    ASSERT_FALSE(list) << text;
    EXPECT_EQ(list.error().code(), Errc::invalid_argument);
    EXPECT_THAT(list.error().message(), HasSubstr(std::string("'") + text + "'"));
  }
}

// ---- nothing to decide -------------------------------------------------------------------------------------------

TEST(NumaPlacement, OnOneNodeThereIsNoneAndNothingIsCalled) {
  FakeNuma one(1, 8);
  EXPECT_EQ(made({}, one), nullptr);
  EXPECT_EQ(made({"2-3", "auto"}, one), nullptr);
  EXPECT_EQ(made({"", "0"}, one), nullptr);
  FakeNuma none(0, 0);  // a system that does not tell
  none.allowed = {0, 1};
  EXPECT_EQ(made({}, none), nullptr);
  FakeNuma two(2, 4);
  EXPECT_EQ(made({"", "off"}, two), nullptr);
  EXPECT_EQ(made({"0-3", "auto"}, two), nullptr) << "cores of one node: memory comes from there anyway";
  two.made_up[1].memory_allowed = false;
  EXPECT_EQ(made({}, two), nullptr);
  two.made_up[1] = {1, {4, 5, 6, 7}, false, true};
  EXPECT_EQ(made({}, two), nullptr);
  for (const FakeNuma* system : {&one, &none, &two}) EXPECT_THAT(system->calls(), IsEmpty());
  EXPECT_TRUE(thread_nodes(nullptr, 4).of_worker.empty());
  enter_as_worker_0(nullptr);
}

// ---- the rule ----------------------------------------------------------------------------------------------------

TEST(NumaPlacement, StripesAndThreadsAreDealtOut) {
  for (const unsigned nodes : {2U, 4U}) {
    FakeNuma system(nodes, 8);
    const auto numa_placement = made({}, system);
    ASSERT_NE(numa_placement, nullptr);
    ASSERT_EQ(numa_placement->node_count(), nodes);
    EXPECT_EQ(numa_placement->node_ids().size(), nodes);
    constexpr std::uint64_t kStripe = NumaPlacement::kStripeBytes;
    for (std::uint64_t stripe = 0; stripe < 9; ++stripe) {
      EXPECT_EQ(numa_placement->node_of(stripe * kStripe), stripe % nodes);
      EXPECT_EQ(numa_placement->node_of(stripe * kStripe + kStripe - 1), stripe % nodes);
    }
    for (unsigned worker = 0; worker < 12; ++worker) EXPECT_EQ(numa_placement->node_of_worker(worker), worker % nodes);
    for (unsigned node = 0; node < nodes; ++node) {
      std::thread([&] {
        set_thread_name("node-" + std::to_string(node));
        numa_placement->enter(node);
        numa_placement->prefer_memory_of(node);
      }).join();
      const std::string cpus = std::to_string(node * 8) + "-" + std::to_string(node * 8 + 7);
      EXPECT_THAT(system.of_thread("node-" + std::to_string(node)),
                  ElementsAre("run on " + cpus, "prefer " + std::to_string(node)));
    }
  }
}

TEST(NumaPlacement, ThreadsFollowTheCpusThatEachNodeHas) {
  FakeNuma system(2, 8);
  const auto numa_placement = made({"0-5,8-9", "auto"}, system);
  ASSERT_NE(numa_placement, nullptr);
  std::vector<unsigned> of_node(2, 0);
  for (unsigned worker = 0; worker < 8; ++worker) ++of_node[numa_placement->node_of_worker(worker)];
  EXPECT_THAT(of_node, ElementsAre(6, 2));
  numa_placement->enter(0);
  numa_placement->enter(1);
  EXPECT_EQ(system.calls()[0].what, "run on 0-5") << "of the node's, those that were given";
  EXPECT_EQ(system.calls()[1].what, "run on 8-9");
}

TEST(NumaPlacement, MemoryWithoutCpusAndNodesOutsideTheCpusetAreNotUsed) {
  FakeNuma system(4, 2);
  system.made_up[1].memory_allowed = false;
  system.made_up[3].cpus.clear();  // as of a memory expander
  const auto numa_placement = made({}, system);
  ASSERT_NE(numa_placement, nullptr);
  EXPECT_THAT(numa_placement->node_ids(), ElementsAre(0, 2));
  system.node_of = [](const std::byte* at) { return std::optional<unsigned>(at == nullptr ? 2 : 3); };
  EXPECT_EQ(numa_placement->node_of_page(nullptr), std::optional<unsigned>(1));
  const std::byte other{};
  EXPECT_EQ(numa_placement->node_of_page(&other), std::nullopt) << "a page of a node that is not used";
}

TEST(NumaPlacement, OneNodeThatTheUserNames) {
  FakeNuma system(2, 4);
  const auto numa_placement = made({"", "1"}, system);
  ASSERT_NE(numa_placement, nullptr);
  EXPECT_THAT(numa_placement->node_ids(), ElementsAre(1));
  EXPECT_EQ(numa_placement->node_of(5 * NumaPlacement::kStripeBytes), 0U);
  EXPECT_THAT(thread_nodes(numa_placement, 3).of_worker, ElementsAre(0, 0, 0));
  enter_as_worker_0(numa_placement);
  EXPECT_EQ(system.calls().back().what, "run on 4-7");
}

TEST(NumaPlacement, WhatCannotBeHadIsNamed) {
  FakeNuma system(2, 4);
  system.allowed = {0, 1, 2, 3};
  expect_refused({"0-99", "auto"}, system, "core 4 is not there, or not open to this process, which may run on 0-3");
  expect_refused({"zero", "auto"}, system, "'zero' is no list");
  expect_refused({"", "2"}, system, "memory node 2 is not there (there are 0-1)");
  expect_refused({"", "1"}, system,
                 "memory node 1 has no core that this process may run on (it has 4-7, the process 0-3)");
  for (const char* text : {"", "one", "-1", "1x", "1-2", "Auto"}) {
    expect_refused({"", text}, system, std::string("'") + text + "' is no node's number, nor auto or off");
  }
  system.made_up[1].memory_allowed = false;
  expect_refused({"", "1"}, system, "memory node 1 is not open to this process");
  system.made_up[1].has_memory = false;
  expect_refused({"", "1"}, system, "memory node 1 has no memory");
  FakeNuma none(0, 0);
  none.allowed = {0};
  expect_refused({"", "0"}, none, "memory node 0 is not there");
  const Status stay = stay_on_cores("3-4", system);
  ASSERT_FALSE(stay);
  EXPECT_EQ(stay.error().code(), Errc::invalid_argument);
  EXPECT_THAT(system.calls(), IsEmpty());
  ASSERT_TRUE(stay_on_cores("", system));
  EXPECT_THAT(system.calls(), IsEmpty());
  ASSERT_TRUE(stay_on_cores("1-2", system));
  EXPECT_EQ(system.calls().back().what, "run on 1-2");
}

TEST(NumaPlacement, WhatIsRefusedIsSaidOnce) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  FakeNuma system(2, 4);
  system.refuse_memory = EPERM;
  const auto numa_placement = made({}, system);
  for (int i = 0; i < 3; ++i) {
    for (unsigned node = 0; node < 2; ++node) {
      numa_placement->enter(node);
      numa_placement->prefer_memory_of(node);
    }
  }
  spdlog::set_default_logger(before);
  EXPECT_EQ(system.calls().size(), 12U);
  EXPECT_THAT(log.str(), HasSubstr("numa_placement_refused what=memory node=0 error=\"Operation not permitted\""));
  const std::string lines = log.str();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1) << lines;
}

TEST(NumaPlacement, APoolsThreadsEnterTheirNodes) {
  FakeNuma system(2, 4);
  const auto numa_placement = made({}, system);
  { const ThreadPool pool(4, "pool", thread_nodes(numa_placement, 4)); }
  EXPECT_THAT(system.of_thread("pool-1"), ElementsAre("run on 4-7"));
  EXPECT_THAT(system.of_thread("pool-2"), ElementsAre("run on 0-3"));
  EXPECT_THAT(system.of_thread("pool-3"), ElementsAre("run on 4-7"));
  EXPECT_EQ(system.calls().size(), 3U) << "who calls run() is left alone";
}

// ---- this machine ------------------------------------------------------------------------------------------------

TEST(LinuxNuma, NodesAreReadFromWhatTheKernelSays) {
  const test::TempDir dir;
  dir.write("nodes/online", "0-1,3\n");
  dir.write("nodes/has_memory", "0,3\n");
  dir.write("nodes/node0/cpulist", "0-3,8-11\n");
  dir.write("nodes/node1/cpulist", "4-7\n");
  dir.write("nodes/node3/cpulist", "\n");
  dir.write("status", "Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t0-1\nThreads:\t1\n");
  LinuxNuma system({dir.path() / "nodes", dir.path() / "status"});
  const auto nodes = system.nodes();
  ASSERT_EQ(nodes.size(), 3U);
  EXPECT_EQ(nodes[0].cpus, parse_cpu_list("0-3,8-11").value());
  EXPECT_TRUE(nodes[0].has_memory && nodes[0].memory_allowed);
  EXPECT_EQ(nodes[1].id, 1U);
  EXPECT_FALSE(nodes[1].has_memory);
  EXPECT_EQ(nodes[2].id, 3U);
  EXPECT_TRUE(nodes[2].cpus.empty());
  EXPECT_FALSE(nodes[2].memory_allowed);
  EXPECT_TRUE(LinuxNuma({dir.path() / "missing", dir.path() / "status"}).nodes().empty());
}

TEST(LinuxNuma, ThreadsReallyStayOnTheirCores) {
  LinuxNuma system;
  const CpuList allowed = system.allowed_cpus().value();
  ASSERT_FALSE(allowed.empty());
  CpuList seen;
  std::thread([&] {
    ASSERT_EQ(system.run_on({allowed.back()}), 0);
    EXPECT_EQ(static_cast<unsigned>(::sched_getcpu()), allowed.back());
    std::thread([&] { seen = system.allowed_cpus().value(); }).join();
    EXPECT_EQ(system.run_on({kCpusMax - 1}), EINVAL) << "no machine has that many";
  }).join();
  EXPECT_THAT(seen, ElementsAre(allowed.back())) << "threads that it starts stay too";
  EXPECT_EQ(system.allowed_cpus().value(), allowed) << "others do not";
}

TEST(LinuxNuma, MemoryReallyComesFromThePreferredNode) {
  LinuxNuma system;
  const auto nodes = system.nodes();
  if (nodes.empty()) GTEST_SKIP() << "this system does not tell of memory nodes";
  const NumaNode& last = nodes.back();
  if (!last.has_memory || !last.memory_allowed) GTEST_SKIP() << "the last node's memory is not ours";
  std::thread([&] {
    const int refused = system.prefer_memory_of(last.id);
    if (refused != 0) GTEST_SKIP() << "memory policies are refused here: " << std::generic_category().message(refused);
    std::vector<std::byte> fresh(std::size_t{8} << 20, std::byte{1});
    EXPECT_EQ(system.node_of_page(fresh.data() + fresh.size() / 2), std::optional<unsigned>(last.id));
    EXPECT_NE(system.prefer_memory_of(4095), 0) << "there is no such node";
  }).join();
}

}  // namespace
}  // namespace deltasync
