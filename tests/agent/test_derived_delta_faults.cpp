// What happens while a merged or compact delta is in the making: a lack of memory, which passes, so that what was
// wanted may be wanted again; and that nobody can ask for it any more.
#include <cstdlib>
#include <functional>
#include <new>
#include <utility>

#include "tests/agent/merges_fixture.hpp"

namespace {

/// Called at this thread's next allocation of at least kTileMemory. The working memory for tiles is more than that, the
/// tables of a small delta are less.
thread_local std::function<void()>* at_work = nullptr;
constexpr std::size_t kTileMemory = 32u << 10;

}  // namespace

void* operator new(std::size_t bytes) {
  if (bytes >= kTileMemory && at_work != nullptr) (*std::exchange(at_work, nullptr))();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}

namespace deltasync::agent {
namespace {

/// One of the deltas that are made, the first unless a test says otherwise, meets `event_` once it works on tiles.
class AtWork : public Merges {
 protected:
  AtWork() {
    options_.core.threads = 2;  // a builder's thread is then the one worker of its pool
    options_.core.before_merge = [this] { at_work = begun_++ == which_ ? &event_ : nullptr; };
  }
  ~AtWork() override {
    merging_.go_on();
    agent_.reset();  // before the event
  }
  void small_step() {
    test::step_small(model_.half, *model_.layout, 0.01, 700 + number_);
    ASSERT_TRUE(offload(*writer_, model_.half, ++number_));
  }
  std::function<void()> event_;
  int which_ = 0;

 private:
  std::atomic<int> begun_{0};
};

class WithoutMemory : public AtWork {
 protected:
  WithoutMemory() {
    event_ = [] { throw std::bad_alloc(); };
  }
};

TEST_F(AtWork, WhatNobodyCanAskForAnyMoreIsGivenUp) {
  event_ = merging_.work();
  options_.core.ring_entries_max = 2;
  start();
  const Late late = late_from_now();
  small_step();
  const Late later = late_from_now();
  small_step();
  const std::vector<std::byte> target = model_.half;
  auto c = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  small_step();  // its base leaves the ring
  const auto chain = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(chain) << chain.error().to_string();
  EXPECT_EQ(chain->steps.size(), 2u);
  expect_leads_there(late, *chain, target);
  merging_.go_on();
  const auto merged = c.plan(later.plan);
  ASSERT_TRUE(merged) << merged.error().to_string();
  EXPECT_EQ(merged->steps.size(), 1u);
  EXPECT_EQ(metrics().merges, 1u) << "the one before was not finished";
  EXPECT_EQ(metrics().merges_failed, 0u);
}

TEST_F(WithoutMemory, AMergeMayBeAskedForAgain) {
  start();
  const Late late = late_from_now();
  for (int i = 0; i < 2; ++i) small_step();
  auto c = client();
  const auto chain = c.plan(late.plan);
  ASSERT_TRUE(chain) << chain.error().to_string();
  EXPECT_EQ(chain->steps.size(), 2u) << "what is there is given meanwhile";
  EXPECT_EQ(metrics().merges_failed, 1u) << "in the work itself";
  const auto merged = c.plan(late.plan);
  ASSERT_TRUE(merged) << merged.error().to_string();
  EXPECT_EQ(merged->steps.size(), 1u);
  expect_leads_there(late, *merged, model_.half);
}

TEST_F(WithoutMemory, ACompactDeltaMayBeAskedForAgain) {
  start();
  Late late = late_from_now();
  late.plan.compact = 1;
  small_step();
  auto c = client();
  const auto plain = c.plan(late.plan);
  ASSERT_TRUE(plain) << plain.error().to_string();
  EXPECT_EQ(plain->steps.at(0).frame_bytes, ring_bytes());
  EXPECT_EQ(metrics().compacts_failed, 1u) << "in the work itself";
  const auto compact = c.plan(late.plan);
  ASSERT_TRUE(compact) << compact.error().to_string();
  EXPECT_LT(compact->steps.at(0).frame_bytes, ring_bytes());
  expect_leads_there(late, *compact, model_.half);
}

/// The merge on the way to a compact delta.
TEST_F(WithoutMemory, AMergedCompactDeltaMayBeAskedForAgain) {
  which_ = 1;  // the compact one is begun first
  start();
  Late late = late_from_now();
  late.plan.compact = 1;
  for (int i = 0; i < 2; ++i) small_step();
  auto c = client();
  const auto chain = c.plan(late.plan);
  ASSERT_TRUE(chain) << chain.error().to_string();
  EXPECT_EQ(chain->steps.size(), 2u);
  EXPECT_EQ(metrics().merges_failed, 1u) << "in the work itself";
  const auto compact = c.plan(late.plan);
  ASSERT_TRUE(compact) << compact.error().to_string();
  EXPECT_EQ(compact->steps.size(), 1u);
  EXPECT_EQ(metrics().compacts, 1u);
  expect_leads_there(late, *compact, model_.half);
}

}  // namespace
}  // namespace deltasync::agent
