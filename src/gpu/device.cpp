#include "gpu/device.hpp"

#include <chrono>

namespace deltasync::gpu {

void Memory::release() noexcept {
  if (data_ != nullptr) owner_->give_back(kind_, data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

Status wait(Event& event, const CallContext& until, std::string_view what, std::chrono::microseconds eager) {
  using std::chrono::steady_clock;
  constexpr std::chrono::microseconds kPause{50};
  const auto began = steady_clock::now();
  for (;;) {
    DS_ASSIGN(const bool done, event.done());
    if (done) return {};
    DS_TRY(until.check(what));
    if (steady_clock::now() - began > eager) until.pause(kPause);
  }
}

Status wait_for_capture(Stream& stream, const CallContext& until, std::string_view whose) {
  constexpr std::chrono::milliseconds kPause{1};
  for (;;) {
    DS_ASSIGN(const bool captured, stream.is_captured());
    if (!captured) return {};
    DS_TRY(until.check("waiting for the end of a graph's capture on " + std::string(whose)));
    until.pause(kPause);
  }
}

}  // namespace deltasync::gpu
