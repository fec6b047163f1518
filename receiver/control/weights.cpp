#include "receiver/control/weights.hpp"

#include <charconv>
#include <mutex>
#include <utility>

#include "receiver/targets/target.hpp"

namespace deltasync::control {
namespace {

Want want_of(const UpdateRequest& request) {
  Want want;
  std::uint64_t number = 0;
  const char* const end = request.version.data() + request.version.size();
  const auto [stopped, failed] = std::from_chars(request.version.data(), end, number);
  if (!request.version.empty() && failed == std::errc() && stopped == end) {
    want.number = number;
  } else {
    want.label = request.version;
  }
  want.directory = request.directory;
  return want;
}

using Names = std::vector<std::pair<std::string, std::string>>;

Names live_names_of(Receiver& receiver) {
  Target* const target = receiver.target();
  const Placement* const placement = target != nullptr ? target->capabilities().placement : nullptr;
  if (placement != nullptr) return placement->live_names();
  Names names;
  for (const Tensor& tensor : receiver.layout()->tensors()) names.emplace_back(tensor.spec.name, tensor.spec.name);
  return names;
}

class ReceiverWeights final : public EngineWeights {
 public:
  explicit ReceiverWeights(Receiver& receiver) : receiver_(receiver), live_names_(live_names_of(receiver)) { look(); }

  Status stage(const UpdateRequest& request, const CallOptions& call) override {
    const std::lock_guard turn(calls_);
    if (stages_in_place()) know(std::nullopt);
    const Status staged = stage_with(request, call);
    look();
    return staged;
  }

  Status commit(const CallOptions& call) override {
    const std::lock_guard turn(calls_);
    const Status done = commit_with(call);
    look();
    return done;
  }

  Status release(const CallOptions& call) override {
    const std::lock_guard turn(calls_);
    know(std::nullopt);
    staged_.reset();
    const Status released = receiver_.release(call);
    look();
    return released;
  }

  Status fill(const CallOptions& call) override {
    const std::lock_guard turn(calls_);
    const auto restored = receiver_.restore(call);
    if (restored) wrong_ = false;
    look();
    return restored ? Status() : Status(restored.error());
  }
  bool stages_in_place() const override { return receiver_.full_update_policy() == FullUpdatePolicy::in_place; }

  /// The receiver is asked while no call of it goes on: the engine's program may have changed it, too.
  std::optional<Version> current() const override {
    if (const std::unique_lock turn(calls_, std::try_to_lock); turn.owns_lock()) look();
    const std::lock_guard lock(known_mutex_);
    return known_;
  }

  Names live_names() const override { return live_names_; }

 private:
  Status stage_with(const UpdateRequest& request, const CallOptions& call) {
    staged_.reset();
    verify_ = request.verify || wrong_;
    DS_ASSIGN(staged_, receiver_.pull(want_of(request), call));
    return {};
  }

  Status commit_with(const CallOptions& call) {
    if (!staged_) return Error(Errc::invalid_argument, "nothing is staged");
    const std::unique_ptr<StagedUpdate> staged = std::move(staged_);
    DS_TRY(staged->commit(call));
    if (!verify_) return {};
    wrong_ = true;
    DS_TRY(verify(call));
    wrong_ = false;
    return {};
  }

  Status verify(const CallOptions& call) {
    DS_ASSIGN(const std::vector<TileMismatch> wrong, receiver_.attest(call));
    if (!wrong.empty()) DS_TRY(receiver_.repair(wrong, call));
    return {};
  }

  void look() const { know(wrong_ ? std::nullopt : receiver_.current()); }
  void know(std::optional<Version> version) const {
    const std::lock_guard lock(known_mutex_);
    known_ = std::move(version);
  }

  Receiver& receiver_;
  const Names live_names_;
  std::unique_ptr<StagedUpdate> staged_;
  bool verify_ = false;
  bool wrong_ = false;        ///< live memory may not be what was committed
  mutable std::mutex calls_;  ///< who calls the receiver has it; protects all above
  mutable std::mutex known_mutex_;
  mutable std::optional<Version> known_;  ///< protected by known_mutex_: what is live
};

}  // namespace

std::unique_ptr<EngineWeights> weights_of(Receiver& receiver) {
  return std::make_unique<ReceiverWeights>(receiver);
}

}  // namespace deltasync::control
