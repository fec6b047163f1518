// Threads whose work can wait.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "base/thread_pool.hpp"

namespace deltasync::agent {

/// Their priority: at 10, copies on all cores took 40 % longer beside them; at 19 no longer than alone. It counts among
/// the threads of one cgroup (and of one autogroup, where the kernel makes those): an agent in a container of its own
/// competes with the trainer by the weights of the two.
inline constexpr int kBackgroundNice = 19;

/// A thread called `name` at that priority, which runs work(pool), the pool being of so many threads, its own included.
/// Throws std::system_error if a thread is not to be had. The caller joins it.
std::thread start_background(const std::string& name, unsigned threads, std::function<void(ThreadPool&)> work);

}  // namespace deltasync::agent
