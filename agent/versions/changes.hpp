// Who wants to hear that what receivers may get has changed.
#pragma once

#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "base/log.hpp"

namespace deltasync::agent {

/// Thread-safe. Its mutex comes before all others: listeners are called with it held, so notify() and the end of a
/// listener are for those who hold no lock.
class Changes {
 public:
  /// Ends the calls. Any thread may drop it, but not from within a call.
  using Listener = std::shared_ptr<void>;

  /// `changed` is called after each change, on any thread, for as long as the listener lives. Those that listened first
  /// are called first. It says nothing of what has changed, so it may come once too often.
  Listener listen(std::function<void()> changed) {
    std::list<std::function<void()>>::iterator here;
    {
      const std::lock_guard lock(list_->mutex);
      here = list_->calls.insert(list_->calls.end(), std::move(changed));
    }
    // Without the lock: if it cannot be made, it is ended.
    return Listener(nullptr, [list = list_, here](void*) {
      const std::lock_guard end(list->mutex);
      list->calls.erase(here);
    });
  }

  /// Where memory is so short that a call throws, the others are called all the same.
  void notify() noexcept {
    const std::lock_guard lock(list_->mutex);
    for (const auto& changed : list_->calls) {
      try {
        changed();
      } catch (const std::exception& e) {
        log::warn("change_not_heard error=\"{}\"", e.what());
      }
    }
  }

 private:
  struct List {
    std::mutex mutex;
    std::list<std::function<void()>> calls;  // protected by mutex
  };
  const std::shared_ptr<List> list_ = std::make_shared<List>();  // listeners may outlive us
};

}  // namespace deltasync::agent
