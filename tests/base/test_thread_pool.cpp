// Every index once, on named threads, over many runs.
#include "base/thread_pool.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <set>
#include <thread>

namespace deltasync {
namespace {

TEST(ThreadPool, EachIndexIsHandedOutOnce) {
  for (const unsigned threads : {0u, 1u, 2u, 5u}) {
    ThreadPool pool(threads, "test");
    EXPECT_EQ(pool.size(), threads == 0 ? 1 : threads);
    for (const std::uint64_t count : {0u, 1u, 2u, 1000u}) {
      std::vector<std::atomic<int>> calls(count);
      std::atomic<int> wrong_workers = 0;
      pool.run(count, [&](std::uint64_t index, unsigned worker) {
        calls[index].fetch_add(1);
        if (worker >= pool.size()) wrong_workers.fetch_add(1);
      });
      for (const auto& c : calls) EXPECT_EQ(c.load(), 1);
      EXPECT_EQ(wrong_workers.load(), 0);
    }
  }
}

TEST(ThreadPool, ResultsAreVisibleWhenRunReturns) {
  ThreadPool pool(3, "test");
  std::vector<std::uint64_t> values(64);
  for (std::uint64_t round = 1; round <= 2000; ++round) {
    pool.run(values.size(), [&](std::uint64_t index, unsigned) { values[index] = round + index; });
    for (std::uint64_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], round + i);
  }
}

TEST(ThreadPool, RunReturnsAfterTheSlowestWorker) {
  ThreadPool pool(2, "test");
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> arrived = 0;
    std::atomic<bool> finished = false;
    pool.run(2, [&](std::uint64_t, unsigned worker) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();  // each thread holds one index
      if (worker == 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      finished.store(true);
    });
    EXPECT_TRUE(finished.load());
  }
}

/// On whichever thread it happens, the caller gets it, no call goes on, and the pool is of use.
TEST(ThreadPool, WhatACallThrowsIsTheCallers) {
  ThreadPool pool(3, "test");
  for (unsigned thrower = 0; thrower < pool.size(); ++thrower) {
    std::atomic<unsigned> arrived = 0;
    std::atomic<unsigned> finished = 0;
    const auto call = [&](std::uint64_t, unsigned worker) {
      arrived.fetch_add(1);
      while (arrived.load() < pool.size()) std::this_thread::yield();  // each thread holds one index
      if (worker == thrower) throw std::bad_alloc();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      finished.fetch_add(1);
    };
    EXPECT_THROW(pool.run(pool.size(), call), std::bad_alloc) << thrower;
    EXPECT_EQ(finished.load(), pool.size() - 1);
    std::atomic<unsigned> calls = 0;
    pool.run(10, [&](std::uint64_t, unsigned) { calls.fetch_add(1); });
    EXPECT_EQ(calls.load(), 10u);
  }
}

TEST(ThreadPool, APoolOfOneRunsOnTheCaller) {
  ThreadPool pool(1, "test");
  const auto caller = std::this_thread::get_id();
  pool.run(10, [&](std::uint64_t, unsigned worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0u);
  });
}

TEST(ThreadPool, WorkersAreNamed) {
  ThreadPool pool(2, "ds-test");
  std::mutex mutex;
  std::set<std::string> names;
  std::atomic<int> arrived = 0;
  pool.run(2, [&](std::uint64_t, unsigned worker) {
    // Both threads take part: each holds its index until the other has its own.
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
    if (worker == 0) return;
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    const std::lock_guard lock(mutex);
    names.insert(name);
  });
  EXPECT_EQ(names, std::set<std::string>{"ds-test-1"});
}

TEST(ThreadPool, EachThreadThatItStartsEntersFirst) {
  std::atomic<int> entered = 0;
  ThreadPool pool(3, "test", [&] { entered.fetch_add(1); });
  std::atomic<int> arrived = 0;
  pool.run(3, [&](std::uint64_t, unsigned) {  // each thread holds one index
    arrived.fetch_add(1);
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(entered.load(), 2) << "not the caller";
}

TEST(ThreadPool, AForkedChildMayDestroyItsCopy) {
  auto pool = std::make_unique<ThreadPool>(3, "test");
  pool->run(10, [](std::uint64_t, unsigned) {});
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(20);
    pool.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  std::atomic<int> calls = 0;
  pool->run(10, [&](std::uint64_t, unsigned) { ++calls; });
  EXPECT_EQ(calls, 10);
}

}  // namespace
}  // namespace deltasync
