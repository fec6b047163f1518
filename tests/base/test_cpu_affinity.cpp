// Lists of CPUs, and threads that are confined to one.
#include "base/cpu_affinity.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cerrno>
#include <thread>

namespace deltasync {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

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

TEST(CpuAffinity, ThreadsReallyStayOnTheirCores) {
  const CpuList allowed = allowed_cpus().value();
  ASSERT_FALSE(allowed.empty());
  CpuList seen;
  std::thread([&] {
    ASSERT_TRUE(stay_on_cores(std::to_string(allowed.back())));
    EXPECT_EQ(static_cast<unsigned>(::sched_getcpu()), allowed.back());
    std::thread([&] { seen = allowed_cpus().value(); }).join();
    EXPECT_EQ(run_on({kCpusMax - 1}), EINVAL) << "no machine has that many";
  }).join();
  EXPECT_THAT(seen, ElementsAre(allowed.back())) << "threads that it starts stay too";
  EXPECT_TRUE(stay_on_cores(""));
  EXPECT_EQ(allowed_cpus().value(), allowed) << "others do not, nor those that no list is for";
}

TEST(CpuAffinity, CoresThatCannotBeHadAreNamed) {
  const std::string first = std::to_string(allowed_cpus().value().front());
  const auto cores = usable_cores(first + ",8191");
  ASSERT_FALSE(cores);
  EXPECT_EQ(cores.error().code(), Errc::invalid_argument);
  EXPECT_THAT(cores.error().message(),
              HasSubstr("core 8191 is not there, or not open to this process, which may run on "));
  EXPECT_FALSE(stay_on_cores("zero"));
  EXPECT_EQ(usable_cores(first).value().size(), 1u);
}

}  // namespace
}  // namespace deltasync
