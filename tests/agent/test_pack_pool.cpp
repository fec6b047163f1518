// The packing threads and what they made, without an agent around them.
#include <gtest/gtest.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>

#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "agent/serve/pack_pool.hpp"
#include "base/deadline.hpp"

namespace deltasync::agent {
namespace {

namespace asio = boost::asio;
using Tiles = PackedFrameCache::Tiles;

constexpr auto kLimit = std::chrono::seconds(60);  // no wait of a test that passes comes near it

PackedFrame frame_of(std::uint64_t hash, std::size_t bytes = 100) {
  PackedFrame made;
  made.frame.bytes.resize(bytes);
  made.hash = hash;
  return made;
}
PackedFrameCache::Make makes(std::uint64_t hash, std::size_t bytes = 100) {
  return [=] { return PackedFramePtr(std::make_shared<const PackedFrame>(frame_of(hash, bytes))); };
}
Result<PackedFramePtr> fails() {
  return Error(Errc::lease_revoked, "told to");
}

// ---- PackedFrameCache
// -------------------------------------------------------------------------------------------------

/// What get() delivered: the frame's hash, 0 for an error, nothing if nothing came.
struct Delivery {
  std::optional<std::uint64_t> hash;
  PackedFrameCache::Deliver to() {
    return [this](const Result<PackedFramePtr>& made) {
      EXPECT_FALSE(hash) << "delivered twice";
      hash = made ? (*made)->hash : 0;
    };
  }
};

TEST(PackedFrameCache, WhatWasMadeIsFoundByItsTiles) {
  PackedFrameCache cache;
  EXPECT_EQ(cache.find({1, 2}), nullptr);
  Delivery first;
  cache.get({1, 2}, makes(7), first.to());
  EXPECT_EQ(first.hash, 7u);
  ASSERT_NE(cache.find({1, 2}), nullptr);
  EXPECT_EQ(cache.find({1, 2})->hash, 7u);
  EXPECT_EQ(cache.find({1}), nullptr);
  EXPECT_EQ(cache.find({1, 2, 3}), nullptr);
  Delivery again;
  cache.get({1, 2}, makes(8), again.to());
  EXPECT_EQ(again.hash, 7u) << "it was there";
}

TEST(PackedFrameCache, WhatCannotBeMadeIsNotThere) {
  PackedFrameCache cache;
  Delivery first;
  cache.get({1}, fails, first.to());
  EXPECT_EQ(first.hash, 0u);
  EXPECT_EQ(cache.find({1}), nullptr);
  Delivery again;
  cache.get({1}, makes(8), again.to());
  EXPECT_EQ(again.hash, 8u);
}

TEST(PackedFrameCache, TheOldestGoFirst) {
  PackedFrameCache cache(250);
  Delivery out[4];
  for (std::uint64_t i = 0; i < 3; ++i) cache.get({i}, makes(i + 1), out[i].to());
  EXPECT_EQ(cache.find({0}), nullptr);
  EXPECT_NE(cache.find({1}), nullptr);
  EXPECT_NE(cache.find({2}), nullptr);
  // One that never fits is delivered all the same.
  cache.get({3}, makes(4, 251), out[3].to());
  EXPECT_EQ(out[3].hash, 4u);
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(cache.find({i}), nullptr);
  // And what went counts no more.
  Delivery more[2];
  for (std::uint64_t i = 0; i < 2; ++i) cache.get({i}, makes(i + 1), more[i].to());
  EXPECT_NE(cache.find({0}), nullptr);
  EXPECT_NE(cache.find({1}), nullptr);
}

TEST(PackedFrameCache, WhoAsksMeanwhileGetsTheSame) {
  PackedFrameCache cache;
  Delivery producer;
  Delivery other;
  Delivery third;
  cache.get(
      {1},
      [&] {
        EXPECT_EQ(cache.find({1}), nullptr) << "not yet";
        cache.get({1}, makes(8), other.to());
        cache.get({1}, makes(9), third.to());
        EXPECT_FALSE(other.hash);
        return makes(7)();
      },
      producer.to());
  EXPECT_EQ(producer.hash, 7u);
  EXPECT_EQ(other.hash, 7u);
  EXPECT_EQ(third.hash, 7u);
}

TEST(PackedFrameCache, WhoWaitsForAFailureMakesItHimself) {
  PackedFrameCache cache;
  Delivery producer;
  Delivery other;
  Delivery third;
  cache.get(
      {1},
      [&] {
        cache.get({1}, makes(8), other.to());
        cache.get({1}, fails, third.to());
        return fails();
      },
      producer.to());
  EXPECT_EQ(producer.hash, 0u);
  EXPECT_EQ(third.hash, 0u) << "asked last, tried first";
  EXPECT_EQ(other.hash, 8u);
  EXPECT_EQ(cache.find({1})->hash, 8u);
}

TEST(PackedFrameCache, ManyThreads) {
  PackedFrameCache cache(1500);
  std::vector<std::thread> threads;
  std::atomic<int> delivered{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < 200; ++i) {
        cache.get({i / 2}, i % 7 == 0 ? PackedFrameCache::Make(fails) : makes(i / 2 + 1),
                  [&delivered, i](const Result<PackedFramePtr>& made) {
                    if (made) {
                      EXPECT_EQ((*made)->hash, i / 2 + 1);
                    }
                    ++delivered;
                  });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(delivered, 800);
}

// ---- PackAhead -------------------------------------------------------------------------------------------------

class Ahead : public ::testing::Test {
 protected:
  explicit Ahead(unsigned threads = 1) : pool_(threads) {}
  ~Ahead() override {
    go_on();
    answers_.clear();
    pool_.stop();
  }
  PackAhead& answer() {
    answers_.push_back(std::make_unique<PackAhead>(pool_, cache_, io_.get_executor()));
    return *answers_.back();
  }
  /// Frames of a tile each, which nobody has asked for before; of those that may_begin() allows, up to so many.
  std::size_t begin(PackAhead& ahead, std::size_t most) {
    std::size_t begun = 0;
    while (begun < most && ahead.may_begin()) {
      ahead.begin(std::make_shared<const Tiles>(Tiles{next_++}), [this] {
        wait_for_go();
        return Result<PackedFrame>(frame_of(1));
      });
      ++begun;
    }
    return begun;
  }
  void go_on() {
    if (!std::exchange(gone_on_, true)) gate_.set_value();
  }
  void wait_for_go() const { go_.wait(); }
  /// Until the oldest frame is there.
  void wait(PackAhead& ahead) {
    bool there = false;
    asio::co_spawn(
        io_, [&]() -> asio::awaitable<void> { there = co_await ahead.wait(kLimit); }, asio::detached);
    io_.restart();
    io_.run();
    EXPECT_TRUE(there);
  }

  /// Until the threads have ended what they were given: a frame of somebody else's comes after it.
  void wait_until_idle() {
    PackAhead last(pool_, cache_, io_.get_executor());
    begin(last, 1);
    wait(last);
  }

  asio::io_context io_;
  PackPool pool_;
  const std::shared_ptr<PackedFrameCache> cache_ = std::make_shared<PackedFrameCache>();
  std::vector<std::unique_ptr<PackAhead>> answers_;
  std::uint64_t next_ = 0;

 private:
  std::promise<void> gate_;
  const std::shared_future<void> go_ = gate_.get_future().share();
  bool gone_on_ = false;
};

TEST_F(Ahead, TogetherTheyKeepTheThreadsBusyOnly) {
  PackAhead& first = answer();
  EXPECT_EQ(begin(first, 9), 4u) << "no more for one answer";
  EXPECT_EQ(begin(answer(), 9), 3u) << "and no more for all than the threads have to do";
  PackAhead& third = answer();
  EXPECT_EQ(begin(third, 9), 1u) << "one is always allowed";
  first.drop();
  EXPECT_EQ(begin(third, 9), 0u);
  answers_.erase(answers_.begin());
  EXPECT_EQ(begin(third, 9), 3u) << "what nobody wants any more counts no more";
}

TEST_F(Ahead, WhatWaitsForItsPeerHoldsUpNobody) {
  go_on();
  std::vector<PackAhead*> stalled;  // their frames are made, and nobody takes them
  for (int i = 0; i < 3; ++i) {
    stalled.push_back(&answer());
    for (int n = 0; n < 4; ++n) {
      EXPECT_EQ(begin(*stalled.back(), 1), 1u);
      wait(*stalled.back());
    }
  }
  for (PackAhead* const ahead : stalled) {
    EXPECT_FALSE(ahead->may_begin()) << "each has what one may have";
  }
  EXPECT_EQ(begin(answer(), 9), 4u);
  for (PackAhead* const ahead : stalled) {
    for (int n = 0; n < 4; ++n) {
      wait(*ahead);
      EXPECT_TRUE(ahead->take());
    }
    EXPECT_TRUE(ahead->may_begin());
  }
}

TEST_F(Ahead, TooManyThatWaitLeaveOneForEach) {
  go_on();
  for (int i = 0; i < 32; ++i) {
    PackAhead& stalled = answer();
    for (int n = 0; n < 4; ++n) {
      EXPECT_EQ(begin(stalled, 1), 1u);
      wait(stalled);
    }
  }
  wait_until_idle();
  PackAhead& other = answer();
  EXPECT_EQ(begin(other, 9), 1u);
  answers_.erase(answers_.begin());
  EXPECT_EQ(begin(other, 9), 3u);
}

TEST_F(Ahead, WhatIsInTheCacheIsThereAtOnce) {
  begin(answer(), 1);
  go_on();
  wait(*answers_.front());
  PackAhead& other = answer();
  other.begin(std::make_shared<const Tiles>(Tiles{0}), []() -> Result<PackedFrame> {
    ADD_FAILURE() << "packed twice";
    return fails().error();
  });
  wait(other);
  EXPECT_EQ(other.front_tiles(), Tiles{0});
  EXPECT_EQ(*other.take(), *answers_.front()->take()) << "the very same";
  EXPECT_TRUE(other.empty());
}

TEST_F(Ahead, OfAStoppedPoolEveryFrameIsRefused) {
  PackAhead& ahead = answer();
  go_on();
  pool_.stop();
  EXPECT_EQ(begin(ahead, 2), 2u);
  for (int i = 0; i < 2; ++i) {
    wait(ahead);
    const auto refused = ahead.take();
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), Errc::connection);
  }
}

class TwoThreads : public Ahead {
 protected:
  TwoThreads() : Ahead(2) {}
};

/// A second one that asks for what is being packed gets that, and keeps no thread from the third.
TEST_F(TwoThreads, OneFrameIsPackedOnceForAll) {
  std::promise<void> begun;
  std::promise<void> other_begun;
  const auto ask = [&](PackAhead& ahead, std::uint64_t tile, std::promise<void>& when) {
    ahead.begin(std::make_shared<const Tiles>(Tiles{tile}), [&when, this] {
      when.set_value();  // throws if it is done twice
      wait_for_go();
      return Result<PackedFrame>(frame_of(1));
    });
  };
  PackAhead& first = answer();
  PackAhead& second = answer();
  PackAhead& third = answer();
  ask(first, 100, begun);
  ASSERT_EQ(begun.get_future().wait_for(kLimit), std::future_status::ready);
  ask(second, 100, begun);
  ask(third, 101, other_begun);
  ASSERT_EQ(other_begun.get_future().wait_for(kLimit), std::future_status::ready);
  go_on();
  wait(first);
  wait(second);
  wait(third);
  EXPECT_EQ(*first.take(), *second.take());
}

}  // namespace
}  // namespace deltasync::agent
