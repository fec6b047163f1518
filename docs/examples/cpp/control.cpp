// An engine whose clients pause it, update its weights and resume it over HTTP, with the routes of vLLM.
//
//   control 127.0.0.1:7070      prints where it listens, and each version that it serves; until it is killed
#include <deltasync/control.hpp>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

using namespace deltasync;

namespace {

/// Has no requests, so there is nothing to end, to wait for or to forget.
class Engine final : public RolloutEngine {
 public:
  Status stop_admission() override {
    admits_ = false;
    return {};
  }
  Status resume_admission() override {
    admits_ = true;
    resumed_ = true;
    return {};
  }
  Result<std::uint64_t> abort(std::span<const std::string>) override { return std::uint64_t{0}; }
  Status wait_idle(const CallOptions&) override { return {}; }
  Status reset_caches(const CallOptions&) override { return {}; }

  /// Since it was last asked.
  bool resumed() { return resumed_.exchange(false); }

 private:
  std::atomic<bool> admits_{true};
  std::atomic<bool> resumed_{false};
};

Status run(const std::string& endpoint) {
  const auto minute = [] { return CallOptions::within(std::chrono::minutes(1)); };
  DS_ASSIGN(const auto receiver, Receiver::connect({.endpoint = endpoint}, minute()));
  DS_TRY(receiver->bind(make_host_target(receiver->layout()), minute()));
  DS_ASSIGN(const auto first, receiver->pull({}, minute()));
  DS_TRY(first->commit(minute()));

  Engine engine;
  DS_ASSIGN(const auto control, ControlServer::start({.dialects = {"vllm"}}, engine, *receiver));
  std::printf("%s\n", control->endpoint().c_str());
  std::fflush(stdout);
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
    if (!engine.resumed()) continue;
    std::printf("serves %s\n", receiver->current()->label.c_str());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: control HOST:PORT\n"), 2;
  const Status done = run(argv[1]);
  if (!done) return std::fprintf(stderr, "control: %s\n", done.error().to_string().c_str()), 1;
}
