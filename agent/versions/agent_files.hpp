// The names of this agent's files, its lock and its segments: whether they are still there, and their removal.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "agent/versions/generation.hpp"
#include "agent/versions/reclaimer.hpp"
#include "shm/segment.hpp"

namespace deltasync::agent {

/// No mutex: look() is called by one thread at a time, the others before the threads and at their end, and nothing that
/// look() reads is written then. Names are for any
/// thread.
class AgentFiles {
 public:
  AgentFiles(shm::AgentLock lock, std::shared_ptr<Reclaimer> reclaimer)
      : lock_(std::make_shared<shm::AgentLock>(std::move(lock))), reclaimer_(std::move(reclaimer)) {}

  /// Cleaners may have taken names away. Who has the files open goes on, but nobody who comes later finds them: that is
  /// logged once, of each. Looks every two seconds at most.
  void look(const std::vector<GenerationPtr>& generations);
  /// Of the relay that brings the versions, for the next agent of the name: the agent that it pulls from. Empty: a
  /// trainer brings them, or nobody has. By the thread of look().
  void keep_source(const std::string& source);
  const std::string& source() const noexcept { return lock_->note(); }
  /// There is nothing for a next agent of the name: the lock's file goes with the lock.
  void remove_lock_at_end() noexcept { lock_->remove_on_release(); }
  /// Removes these generations' files, and the lock's at the end.
  void remove(const std::vector<GenerationPtr>& generations);

  /// Removes all of them, of an agent whose end cannot be waited for. May outlive the agent. It holds the lock of the
  /// agent's name, so nothing of another agent is removed.
  class Names {
   public:
    void remove() const noexcept;

   private:
    friend class AgentFiles;
    Names(std::shared_ptr<shm::AgentLock> lock, std::shared_ptr<Reclaimer> reclaimer)
        : lock_(std::move(lock)), reclaimer_(std::move(reclaimer)) {}
    std::shared_ptr<shm::AgentLock> lock_;
    std::shared_ptr<Reclaimer> reclaimer_;
  };
  Names names() const { return {lock_, reclaimer_}; }

 private:
  const std::shared_ptr<shm::AgentLock> lock_;
  const std::shared_ptr<Reclaimer> reclaimer_;
  std::chrono::steady_clock::time_point look_at_{};  // the time of the next look
  std::set<std::filesystem::path> nameless_;         // of which it has been said
};

}  // namespace deltasync::agent
