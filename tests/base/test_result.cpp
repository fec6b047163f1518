// Errors as values: codes, context, propagation.
#include "deltasync/result.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>

namespace deltasync {
namespace {

Result<int> half_of(int n) {
  if (n % 2 != 0) return Error(Errc::invalid_argument, std::to_string(n) + " is odd");
  return n / 2;
}
Result<int> quarter_of(int n) {
  DS_ASSIGN(const int half, half_of(n).with_context("quarter of " + std::to_string(n)));
  return half_of(half);
}
Status check_even(int n) {
  DS_TRY(half_of(n));
  return {};
}

TEST(Result, CarriesValueOrError) {
  EXPECT_EQ(quarter_of(8).value(), 2);
  const auto odd = quarter_of(3);
  ASSERT_FALSE(odd.ok());
  EXPECT_EQ(odd.error().code(), Errc::invalid_argument);
  EXPECT_EQ(odd.error().message(), "quarter of 3: 3 is odd");
  EXPECT_EQ(odd.error().to_string(), "invalid_argument: quarter of 3: 3 is odd");
  EXPECT_EQ(quarter_of(6).error().message(), "3 is odd");
}

TEST(Result, StatusPropagatesAndTakesContext) {
  EXPECT_TRUE(check_even(2).ok());
  EXPECT_TRUE(check_even(2).with_context("x").ok());
  EXPECT_EQ(check_even(5).with_context("outer").error().message(), "outer: 5 is odd");
}

TEST(Result, MovesWhatItHolds) {
  Result<std::unique_ptr<int>> r(std::make_unique<int>(7));
  const auto owned = std::move(r).value();
  EXPECT_EQ(*owned, 7);
}

TEST(ResultDeathTest, ReadingTheWrongSideAbortsWithTheMessage) {
  EXPECT_DEATH((void)half_of(3).value(), "3 is odd");
  EXPECT_DEATH((void)half_of(4).error(), "successful Result");
}

TEST(Errc, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(Errc::cancelled); ++i) names.insert(to_string(static_cast<Errc>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Errc::cancelled) + 1);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_EQ(to_string(static_cast<Errc>(200)), "unknown");
}

TEST(Errc, ErrnoMapsToWhatACallerCanReactTo) {
  EXPECT_EQ(Error::from_errno("x", ENOSPC).code(), Errc::no_space);
  EXPECT_EQ(Error::from_errno("x", ENOMEM).code(), Errc::no_space);
  EXPECT_EQ(Error::from_errno("x", EACCES).code(), Errc::permission);
  EXPECT_EQ(Error::from_errno("x", ENOENT).code(), Errc::not_found);
  EXPECT_EQ(Error::from_errno("x", EEXIST).code(), Errc::already_exists);
  EXPECT_EQ(Error::from_errno("x", ECONNRESET).code(), Errc::connection);
  EXPECT_EQ(Error::from_errno("x", ETIMEDOUT).code(), Errc::timed_out);
  EXPECT_EQ(Error::from_errno("x", EIO).code(), Errc::io);
  EXPECT_EQ(Error::from_errno("open /a", ENOENT).message(), "open /a: No such file or directory");
}

}  // namespace
}  // namespace deltasync
