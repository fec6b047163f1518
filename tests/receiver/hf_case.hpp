// One directory target under test, its trainer, and helpers to run parts of a test in a process of their own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "base/fd.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {

inline testing::AssertionResult ok(const Status& status) {
  if (status.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << status.error().to_string();
}
inline testing::AssertionResult fails(const Status& status, Errc code, const std::string& naming = "") {
  if (status.ok()) return testing::AssertionFailure() << "succeeded";
  if (status.error().code() == code && status.error().message().find(naming) != std::string::npos) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << status.error().to_string();
}

/// Large enough that a patch takes a moment, small enough for hundreds of versions.
inline std::vector<TensorSpec> two_tensors() {
  return {{"layer.0.weight", Dtype::bf16, {512, 256}, {}, {}}, {"layer.1.weight", Dtype::bf16, {512, 300}, {}, {150}}};
}

class HfCase {
 public:
  /// For restart(). Small disks may be filled to the end.
  HfTargetOptions& options() { return options_; }
  explicit HfCase(std::filesystem::path out, std::uint64_t seed = 1, std::vector<TensorSpec> specs = sample_specs())
      : out_(std::move(out)), trainer_(seed, std::move(specs)), sidecar_(awkward_sidecar(*trainer_.layout())) {}

  /// A receiver starts: the target before is closed.
  Status restart() {
    target_.reset();
    DS_ASSIGN(target_, make_hf_target(trainer_.layout(), sidecar_, out_, options_));
    return target_->open(pool_, in_time());
  }
  Status full(FullUpdatePolicy policy = FullUpdatePolicy::stage) {
    DS_TRY(commit_whole(*target_, trainer_.now(), policy));
    held_ = trainer_.now();
    return {};
  }
  /// The next version by a delta.
  Status delta(double density = 0.02, delta::ValueForm form = delta::ValueForm::ulp) {
    const Reference after = trainer_.step(density);
    std::vector<StagedStep> steps;
    steps.push_back(trainer_.delta(held_, after, form));
    DS_TRY(target_->commit_delta(std::move(steps), after.state, in_time()));
    held_ = after;
    return {};
  }
  /// out/current holds exactly this version's files; empty if so.
  std::string differs(const Reference& reference) const {
    return compare_directory(out_ / "current", *trainer_.layout(), sidecar_, reference.half);
  }
  std::string differs() const { return differs(held_); }

  std::filesystem::path weight_file(std::size_t index = 0) const {
    return std::filesystem::canonical(out_ / "current") / sidecar_.weights[index].name;
  }
  std::vector<std::byte> weight_bytes(const Reference& reference, std::size_t index = 0) const {
    return weight_file_bytes(*trainer_.layout(), sidecar_.weights[index], reference.half);
  }
  /// Entries of out/versions: versions, records and everything else.
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(out_ / "versions")) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::size_t version_count() const {
    std::size_t n = 0;
    for (const std::string& name : entries()) n += name[0] != '.' && name.find(".json") == std::string::npos ? 1 : 0;
    return n;
  }
  bool has_incoming() const { return has_incoming(out_); }
  /// While another process works there, too.
  static bool has_incoming(const std::filesystem::path& out) {
    std::error_code failed;
    for (const auto& entry : std::filesystem::directory_iterator(out / "versions", failed)) {
      if (entry.path().filename().string()[0] == '.') return true;
    }
    return false;
  }

  const std::filesystem::path& out() const { return out_; }
  TrainerModel& trainer() { return trainer_; }
  Sidecar& sidecar() { return sidecar_; }
  Target& target() { return *target_; }
  void close() { target_.reset(); }
  const Reference& held() const { return held_; }
  void holds(const Reference& reference) { held_ = reference; }

 private:
  std::filesystem::path out_;
  HfTargetOptions options_{.disk_reserve_bytes = 0};
  TrainerModel trainer_;
  Sidecar sidecar_;
  Reference held_;
  ThreadPool pool_{2, "target"};
  std::unique_ptr<Target> target_;
};

/// A forked process that runs a function and reports one string. Fork before starting threads, or use nothing of them.
class Child {
 public:
  /// `body` gets a descriptor that reads end-of-file when the parent wants it to finish.
  explicit Child(const std::function<std::string(int stop)>& body) {
    std::array<int, 2> stop{};
    std::array<int, 2> report{};
    if (pipe2(stop.data(), O_CLOEXEC) != 0 || pipe2(report.data(), O_CLOEXEC) != 0) std::abort();
    pid_ = fork();
    if (pid_ < 0) std::abort();  // a signal to process -1 would go to everybody
    if (pid_ == 0) {
      ::close(stop[1]);
      ::close(report[0]);
      const std::string text = body(stop[0]);
      if (write(report[1], text.data(), text.size()) < 0) _exit(2);
      _exit(0);
    }
    ::close(stop[0]);
    ::close(report[1]);
    stop_.reset(stop[1]);
    report_.reset(report[0]);
  }
  ~Child() {
    if (pid_ > 0) kill_and_wait();
  }

  /// Asks it to finish and returns what it reported ("killed by signal …" if it did not get that far).
  std::string finish() {
    stop_.reset();
    std::string text;
    std::array<char, 4096> block{};
    for (ssize_t n; (n = read(report_.get(), block.data(), block.size())) > 0;) text.append(block.data(), n);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    if (WIFSIGNALED(status)) return "killed by signal " + std::to_string(WTERMSIG(status));
    if (WEXITSTATUS(status) != 0) return "exited with status " + std::to_string(WEXITSTATUS(status));
    return text;
  }
  void kill_and_wait() {
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  UniqueFd stop_;
  UniqueFd report_;
};

/// In a child: waits until the parent wants it to finish, at most this long; true if it does.
inline bool wants_stop(int stop, int wait_ms) {
  fd_set set;
  FD_ZERO(&set);
  FD_SET(stop, &set);
  timeval time{wait_ms / 1000, (wait_ms % 1000) * 1000};
  return select(stop + 1, &set, nullptr, nullptr, &time) > 0;
}

}  // namespace deltasync::test
