// Who hears of a change.
#include <gtest/gtest.h>

#include <new>

#include "agent/versions/changes.hpp"

namespace deltasync::agent {
namespace {

TEST(Changes, OneThatHasNoMemoryForItKeepsItFromNobody) {
  Changes changes;
  int heard = 0;
  const auto first = changes.listen([&] { ++heard; });
  const auto fails = changes.listen([] { throw std::bad_alloc(); });
  auto last = changes.listen([&] { ++heard; });
  changes.notify();
  EXPECT_EQ(heard, 2);
  last.reset();
  changes.notify();
  EXPECT_EQ(heard, 3);
}

}  // namespace
}  // namespace deltasync::agent
