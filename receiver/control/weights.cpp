#include "receiver/control/weights.hpp"

#include <atomic>
#include <charconv>
#include <utility>

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
  return want;
}

class ReceiverWeights final : public EngineWeights {
 public:
  explicit ReceiverWeights(Receiver& receiver) : receiver_(receiver) {}

  Status stage(const UpdateRequest& request, const CallOptions& call) override {
    staged_.reset();
    verify_ = request.verify || wrong_;
    DS_ASSIGN(staged_, receiver_.pull(want_of(request), call));
    return {};
  }

  Status commit(const CallOptions& call) override {
    if (!staged_) return Error(Errc::invalid_argument, "nothing is staged");
    const std::unique_ptr<StagedUpdate> staged = std::move(staged_);
    DS_TRY(staged->commit(call));
    if (!verify_) return {};
    wrong_ = true;
    DS_TRY(verify(call));
    wrong_ = false;
    return {};
  }

  Status release(const CallOptions& call) override {
    staged_.reset();
    return receiver_.release(call);
  }

  Status fill(const CallOptions& call) override {
    DS_TRY(receiver_.restore(call));
    wrong_ = false;
    return {};
  }
  bool stages_in_place() const override { return receiver_.full_update_policy() == FullUpdatePolicy::in_place; }
  std::optional<Version> current() const override { return wrong_ ? std::nullopt : receiver_.current(); }

 private:
  Status verify(const CallOptions& call) {
    DS_ASSIGN(const std::vector<TileMismatch> wrong, receiver_.attest(call));
    if (!wrong.empty()) DS_TRY(receiver_.repair(wrong, call));
    return {};
  }

  Receiver& receiver_;
  std::unique_ptr<StagedUpdate> staged_;
  bool verify_ = false;
  std::atomic<bool> wrong_{false};  ///< live memory may not be what was committed
};

}  // namespace

std::unique_ptr<EngineWeights> weights_of(Receiver& receiver) {
  return std::make_unique<ReceiverWeights>(receiver);
}

}  // namespace deltasync::control
