// What a search of the protocol as it is must find: all of it, and nothing wrong.
#pragma once

#include <gtest/gtest.h>

#include "shm/model_configs.hpp"

namespace deltasync::shm::model {

inline void expect_clean(const Config& config) {
  const auto out = run(config);
  EXPECT_FALSE(out.truncated) << "the bound cut the search: it proves nothing";
  EXPECT_EQ(out.violation, Violation::none) << name(out.violation);
  EXPECT_GT(out.completed, 0u) << "the search never came to an end of the work";
  EXPECT_GT(out.sealed_versions, 0u);
  for (const auto& line : out.trace) std::printf("      %s\n", line.c_str());
}

}  // namespace deltasync::shm::model
