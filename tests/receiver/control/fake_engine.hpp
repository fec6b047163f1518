// An engine and its weights whose hooks are noted, fail on request and wait on request.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/control.hpp"
#include "receiver/control/call.hpp"
#include "receiver/control/weights.hpp"

namespace deltasync::control::test {

/// What was done, by both.
class Notes {
 public:
  /// Notes a hook. Waits while it is blocked, until the call's end; then says what it shall fail with.
  Status note(const std::string& hook, const CallOptions& call = {}) {
    std::unique_lock lock(mutex_);
    done_.push_back(hook);
    ++entered_[hook];
    changed_.notify_all();
    if (const auto found = acts_.find(hook); found != acts_.end()) found->second();
    while (blocked_ == hook) {
      if (call.stop.stop_requested()) return Error(Errc::cancelled, hook + ": stopped");
      if (std::chrono::steady_clock::now() >= call.deadline) return Error(Errc::timed_out, hook + ": still busy");
      changed_.wait_for(lock, std::chrono::milliseconds(5));
    }
    if (throwing_ == hook) {
      throwing_.clear();
      throw std::runtime_error(hook + " throws");
    }
    const auto found = failing_.find(hook);
    if (found == failing_.end() || found->second == 0) return {};
    --found->second;
    return Error(Errc::io, hook + " is broken");
  }
  void fail(const std::string& hook, int times = 1) {
    const std::lock_guard lock(mutex_);
    failing_[hook] = times;
  }
  /// What the hook does besides.
  void at(const std::string& hook, std::function<void()> act) { acts_[hook] = std::move(act); }
  void throws(const std::string& hook) {
    const std::lock_guard lock(mutex_);
    throwing_ = hook;
  }
  void block(const std::string& hook) {
    const std::lock_guard lock(mutex_);
    blocked_ = hook;
    entered_[hook] = 0;
  }
  void unblock() {
    const std::lock_guard lock(mutex_);
    blocked_.clear();
    changed_.notify_all();
  }
  void wait_for(const std::string& hook) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return entered_[hook] > 0; });
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(done_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> done_;       // protected by mutex_, as all below
  std::map<std::string, int> failing_;  ///< how often it fails
  std::map<std::string, int> entered_;
  std::map<std::string, std::function<void()>> acts_;  ///< set before anything is asked
  std::string blocked_;
  std::string throwing_;
};

class FakeEngine final : public RolloutEngine {
 public:
  explicit FakeEngine(Notes& notes) : notes_(notes) {}

  Status stop_admission() override { return notes_.note("stop_admission"); }
  Status resume_admission() override { return notes_.note("resume_admission"); }
  Result<std::uint64_t> abort(std::span<const std::string> ids) override {
    DS_TRY(notes_.note("abort"));
    return ids.empty() ? std::uint64_t{7} : ids.size();
  }
  Status wait_idle(const CallOptions& call) override { return notes_.note("wait_idle", call); }
  bool can_hold() const override { return true; }
  Status hold(const CallOptions& call) override { return notes_.note("hold", call); }
  Status release_hold() override { return notes_.note("release_hold"); }
  Status reset_caches(const CallOptions& call) override { return notes_.note("reset_caches", call); }
  Status release_memory(EngineMemory memory) override {
    return notes_.note("release " + std::string(to_string(memory)));
  }
  Status restore_memory(EngineMemory memory) override {
    return notes_.note("restore " + std::string(to_string(memory)));
  }

 private:
  Notes& notes_;
};

class FakeWeights final : public EngineWeights {
 public:
  explicit FakeWeights(Notes& notes, std::uint64_t number = 1) : notes_(notes), number_(number) {}

  Status stage(const UpdateRequest& request, const CallOptions& call) override {
    DS_TRY(notes_.note("stage", call));
    const bool numbered = !request.version.empty() && request.version.front() <= '9';
    staged_ = numbered ? std::stoull(request.version) : number_ + 1;
    version = request.version;
    deadline = call.deadline;
    verify = request.verify;
    directory = request.directory;
    return {};
  }
  Status commit(const CallOptions& call) override {
    const Status done = notes_.note("commit", call);
    if (!done && void_on_failure) number_ = 0;
    DS_TRY(Status(done));
    number_ = staged_;
    return {};
  }
  Status release(const CallOptions& call) override {
    DS_TRY(notes_.note("release", call));
    kept_ = number_.exchange(0);
    return {};
  }
  Status fill(const CallOptions& call) override {
    DS_TRY(notes_.note("fill", call));
    if (kept_ == 0) return Error(Errc::not_found, "there was no version");
    number_ = kept_;
    return {};
  }
  bool stages_in_place() const override { return false; }
  std::optional<Version> current() const override {
    if (when_asked) when_asked();
    const std::uint64_t number = number_;
    if (number == 0) return std::nullopt;
    return Version{.id = {.epoch = epoch, .number = number}, .label = ""};
  }
  std::vector<std::pair<std::string, std::string>> live_names() const override {
    return {{"qkv", "k_proj"}, {"qkv", "q_proj"}, {"up", "up"}};
  }

  /// Beside any call.
  void become_void() { number_ = 0; }

  std::function<void()> when_asked;  ///< for the live version
  bool void_on_failure = false;
  bool verify = false;
  std::string version;
  std::chrono::steady_clock::time_point deadline;  ///< of the last stage
  std::string directory;
  std::uint64_t epoch = 9;

 private:
  Notes& notes_;
  std::atomic<std::uint64_t> number_;  ///< 0: none
  std::uint64_t staged_ = 0;
  std::uint64_t kept_ = 0;
};

}  // namespace deltasync::control::test
