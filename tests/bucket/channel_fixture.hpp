// An engine with a receiver at a bucket channel, and trainers of every kind.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bucket/sender.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::test {

inline CallOptions in_a_minute() {  // no wait of a test that passes comes near it
  return CallOptions::within(std::chrono::seconds(60));
}
inline CallContext soon() {
  return CallContext(in_a_minute());
}

inline std::vector<TensorSpec> bucket_specs() {
  std::vector<TensorSpec> specs = sample_specs();
  specs.push_back({.name = "large", .dtype = Dtype::bf16, .shape = {3000, 1024}, .row_cuts = {100, 333}});
  return specs;
}

inline constexpr std::uint64_t kBucketBytes = 1u << 20;
inline constexpr std::uint64_t kEpoch = 77;

inline Version version_of(std::uint64_t number) {
  return {{kEpoch, number}, "step_" + std::to_string(number)};
}

/// Runs as another process; 0: it succeeded.
class Child {
 public:
  explicit Child(const std::function<int()>& run) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(60);
    ::_exit(run());
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    static_cast<void>(wait());
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }
  void signal(int number) const {
    if (pid_ > 0) ::kill(pid_, number);
  }
  /// Its exit status, or minus the signal that ended it.
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

/// One byte from one process to another.
class Signal {
 public:
  Signal() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  void give() const { static_cast<void>(!::write(ends_[1], "x", 1)); }
  void wait() const {
    char byte = 0;
    static_cast<void>(!::read(ends_[0], &byte, 1));
  }

 private:
  int ends_[2] = {-1, -1};
};

class BucketChannel : public ::testing::Test {
 protected:
  std::string path() const { return (dir_.path() / "engine.sock").string(); }

  Result<std::unique_ptr<bucket::Sender>> open(bucket::SenderOptions options = {}) const {
    return open(std::move(options), make_sidecar(*model_.layout));
  }
  Result<std::unique_ptr<bucket::Sender>> open(bucket::SenderOptions options, const Sidecar& sidecar) const {
    options.socket = path();
    if (options.half_bytes == bucket::SenderOptions().half_bytes) options.half_bytes = kBucketBytes;
    return bucket::Sender::open(model_.layout, sidecar, std::move(options), soon());
  }
  /// Sends what `half` has of the sender's tensors.
  static Status send(bucket::Sender& sender, const std::vector<std::byte>& half, std::uint64_t number) {
    return send(sender, half, version_of(number));
  }
  static Status send(bucket::Sender& sender, const std::vector<std::byte>& half, const Version& version) {
    DS_TRY(sender.begin(version, soon()));
    const auto tensors = sender.layout().tensors();
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      if (!sender.share().has(t)) continue;
      DS_TRY(sender.put(t, ByteSpan(half).subspan(tensors[t].offset, tensors[t].bytes), soon()));
    }
    return sender.finish(soon());
  }

  Result<std::unique_ptr<Receiver>> connect(ReceiverOptions options = {}) const {
    options.endpoint = "bucket:" + path();
    options.threads = 2;
    DS_ASSIGN(auto receiver, Receiver::connect(std::move(options), in_a_minute()));
    DS_TRY(receiver->bind(make_host_target(receiver->layout()), in_a_minute()));
    return receiver;
  }
  static Status take(Receiver& receiver, std::uint64_t number) {
    DS_ASSIGN(const auto staged, receiver.pull({.number = number}, in_a_minute()));
    return staged->commit(in_a_minute());
  }
  static bool has(Receiver& receiver, const std::vector<std::byte>& half) {
    const auto memory = host_target_memory(*receiver.target());
    return memory.size() >= half.size() && std::equal(half.begin(), half.end(), memory.begin());
  }

  TempDir dir_;
  TestModel model_ = make_model(1, bucket_specs());
};

}  // namespace deltasync::test
