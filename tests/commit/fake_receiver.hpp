// A receiver without an agent: versions are numbers that a test publishes, and what a rank serves is one number.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "base/call_context.hpp"
#include "deltasync/receiver.hpp"

namespace deltasync::commit {

/// Says which version is the newest, and how a rank keeps one.
class Trainer {
 public:
  virtual ~Trainer() = default;
  virtual Version newest() const = 0;
  /// A rank's target holds this from now on.
  virtual void held(const std::optional<Version>& /*version*/) const {}
};

/// What the trainer has published. Thread-safe.
class FakeTrainer final : public Trainer {
 public:
  void publish(std::string label) {
    const std::lock_guard lock(mutex_);
    newest_ = {{1, newest_.id.number + 1}, std::move(label)};
  }
  Version newest() const override {
    const std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  mutable std::mutex mutex_;
  Version newest_;  // protected by mutex_
};

/// Has the newest version only, as an agent has it for those who hold nothing. Waits, as a real one does, for a version
/// that is still to come.
class FakeReceiver final : public Receiver {
 public:
  explicit FakeReceiver(const Trainer& trainer, std::optional<Version> held = {}) : trainer_(trainer) { write(held); }

  const LayoutPtr& layout() const override { return layout_; }
  const Sidecar& sidecar() const override { return sidecar_; }
  Status bind(std::unique_ptr<Target> /*none*/, const std::vector<Slice>& /*all*/,
              const CallOptions& /*none*/) override {
    return {};
  }
  Target* target() override { return reinterpret_cast<Target*>(this); }  // there is one: nobody looks at it
  const std::vector<Slice>& slices() const override { return slices_; }
  FullUpdatePolicy full_update_policy() const override { return policy; }
  bool supports_rollback() const override { return !commits_are_final; }
  std::optional<Version> current() const override { return current_; }
  Lag lag(const CallOptions& /*none*/) const override { return {}; }
  std::pair<std::uint64_t, std::uint64_t> progress() const override { return {}; }
  Result<bool> is_current(const StagedUpdate&, const Want&, const CallOptions&) override { return true; }
  Result<std::vector<TileMismatch>> attest(const CallOptions&) override { return no_memory(); }
  Result<RepairReport> repair(std::span<const std::uint64_t>, const CallOptions&) override { return no_memory(); }
  Status release(const CallOptions&) override { return no_memory(); }
  Result<RepairReport> restore(const CallOptions&) override { return no_memory(); }
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions& call) override {
    note_touch();
    wanted_epoch = want.epoch;
    const CallContext until(call);
    Version newest = trainer_.newest();
    while (is_to_come(want, newest)) {
      waits = true;
      until.pause(kLook);
      waits = !until.over();
      DS_TRY(until.check("waiting for a version"));
      newest = trainer_.newest();
    }
    waits = false;
    if (want.number && *want.number != newest.id.number) return Error(Errc::gone, "past");
    auto staged = std::make_unique<Staged>(*this);
    staged->report_.version = newest;
    staged->report_.root.bytes[0] = static_cast<std::uint8_t>(newest.id.number);
    return std::unique_ptr<StagedUpdate>(std::move(staged));
  }

  std::atomic<std::uint64_t> memory{0};
  std::atomic<int> fail_commits{0};
  std::atomic<unsigned> rollbacks{0};
  std::atomic<const std::atomic<bool>*> forbidden_while{nullptr};  ///< no pull and no write while that is true
  std::atomic<bool> broke_in{false};                               ///< there was one

  FullUpdatePolicy policy = FullUpdatePolicy::stage;
  bool commits_are_final = false;
  std::atomic<bool> never_comes{false};  ///< what is wanted by number
  std::atomic<bool> waits{false};        ///< for what is still to come, now
  std::atomic<std::uint64_t> wanted_epoch{0};

 private:
  static constexpr auto kLook = std::chrono::milliseconds(1);  ///< at what the trainer has; it may be a file

  struct Staged final : StagedUpdate {
    explicit Staged(FakeReceiver& receiver) : receiver_(receiver) {}
    const PullReport& report() const override { return report_; }
    Status commit(const CallOptions& /*at once*/) override {
      if (receiver_.fail_commits > 0) {
        --receiver_.fail_commits;
        return Error(Errc::timed_out, "the commit takes too long");
      }
      before_ = receiver_.current_;
      receiver_.write(report_.version);
      committed_ = true;
      return {};
    }
    Status rollback() override {
      if (!committed_) return {};
      receiver_.write(before_);
      committed_ = false;
      ++receiver_.rollbacks;
      return {};
    }
    FakeReceiver& receiver_;
    PullReport report_;
    std::optional<Version> before_;
    bool committed_ = false;
  };

  static Error no_memory() { return {Errc::unsupported, "a version is one number here"}; }
  bool is_to_come(const Want& want, const Version& newest) const {
    if (want.number) return never_comes || *want.number > newest.id.number;
    return want.newer && current_ && newest.id <= current_->id;
  }
  void note_touch() {
    const auto* const flag = forbidden_while.load();
    if (flag != nullptr && *flag) broke_in = true;
  }
  void write(const std::optional<Version>& version) {
    note_touch();
    current_ = version;
    memory = version ? version->id.number : 0;
    trainer_.held(version);
  }

  const Trainer& trainer_;
  const LayoutPtr layout_ = *Layout::build({{"w", Dtype::bf16, {4}, {}, {}}});
  const std::vector<Slice> slices_;
  const Sidecar sidecar_;
  std::optional<Version> current_;
};

}  // namespace deltasync::commit
