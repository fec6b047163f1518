// Host memory that this process has registered with CUDA, for all of its devices: by each user once, ended by the last,
// and not by waiting (ends_later.hpp). Until the driver has let go of it, the memory stays mapped: else somebody's next
// mapping at this address would be taken for it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "deltasync/result.hpp"

namespace deltasync::gpu {

/// Thread-safe.
class Registrations {
 public:
  /// Outlives all devices.
  static Registrations& of_process();

  using Call = std::function<Status()>;
  /// One more user of [data, data + bytes). `begin` registers it, `end` ends that on another thread, both without a
  /// lock; where it is registered already, neither is used. `keeper` has the memory mapped, or it is for as long as the
  /// process lives. io: it is being registered, or the end of what was there before waits for a device's work. `who`
  /// names the user in errors.
  Status add(const std::string& who, const std::byte* data, std::uint64_t bytes, std::shared_ptr<const void> keeper,
             const Call& begin, Call end);
  /// One user less.
  void remove(const std::byte* data) noexcept;

 private:
  struct Range {
    std::uint64_t bytes = 0;
    std::uint64_t users = 0;
    enum class State : std::uint8_t { beginning, held, ending, stuck } state = State::beginning;
    std::shared_ptr<const void> keeper;
    Call end;
  };
  Status take(std::unique_lock<std::mutex>& lock, const std::byte* data, std::uint64_t bytes, bool& is_taken);
  void end(const std::byte* data);

  std::mutex mutex_;
  std::condition_variable ended_;
  std::map<const std::byte*, Range> ranges_;  ///< protected by mutex_
};

}  // namespace deltasync::gpu
