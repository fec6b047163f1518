// A thread that makes links' progress: UCX moves nothing while nobody calls it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fd.hpp"
#include "deltasync/result.hpp"
#include "net/ucx/link.hpp"

namespace deltasync::net::ucx {

class Progress {
 public:
  /// no_space if there is no thread or descriptor to be had.
  static Result<std::unique_ptr<Progress>> make(const std::string& name);
  /// halt()
  ~Progress();

  /// Any thread: the link has something to do. The first time the thread takes a share of it, until it has left.
  void poke(const std::shared_ptr<Link>& link);
  void ask_halt();
  /// Ends the thread; links fail. Those that have left get a moment to send what they have. May be called again.
  void halt();

 private:
  Progress() = default;
  void run();
  void take_poked();
  bool pump_due();
  void drop(Link* link);

  UniqueFd poll_;
  UniqueFd wake_;
  std::thread thread_;
  std::atomic<bool> halting_{false};

  std::mutex mutex_;
  std::vector<std::shared_ptr<Link>> poked_;  // protected by mutex_

  // The thread's.
  std::unordered_map<Link*, std::shared_ptr<Link>> links_;
  std::vector<Link*> due_;
};

}  // namespace deltasync::net::ucx
