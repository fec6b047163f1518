// A made-up machine with memory nodes, which writes down what it is asked to do and by which thread.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/numa.hpp"

namespace deltasync::test {

class FakeNuma final : public NumaSystem {
 public:
  struct Call {
    std::string thread;
    std::string what;  ///< "run on 0-3", "prefer 1"
    bool operator==(const Call&) const = default;
  };

  /// Nodes of so many CPUs each, numbered through, all open to the process.
  FakeNuma(unsigned nodes, unsigned cpus_each) {
    for (unsigned id = 0; id < nodes; ++id) {
      NumaNode node{id, {}, true, true};
      for (unsigned c = 0; c < cpus_each; ++c) node.cpus.push_back(id * cpus_each + c);
      allowed.insert(allowed.end(), node.cpus.begin(), node.cpus.end());
      made_up.push_back(std::move(node));
    }
  }

  std::vector<NumaNode> nodes() override { return made_up; }
  Result<CpuList> allowed_cpus() override { return allowed; }
  int run_on(const CpuList& cpus) override { return note("run on " + to_string(cpus), refuse_cpus); }
  int prefer_memory_of(unsigned node) override { return note("prefer " + std::to_string(node), refuse_memory); }
  std::optional<unsigned> node_of_page(const std::byte* at) override { return node_of ? node_of(at) : std::nullopt; }

  /// What threads of this name asked for, in order.
  std::vector<std::string> of_thread(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> list;
    for (const Call& call : calls_) {
      if (call.thread == name) list.push_back(call.what);
    }
    return list;
  }
  std::vector<Call> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

  std::vector<NumaNode> made_up;
  CpuList allowed;
  int refuse_cpus = 0;  ///< errno
  int refuse_memory = 0;
  std::function<std::optional<unsigned>(const std::byte*)> node_of;

 private:
  int note(std::string what, int error) {
    char name[16] = {};
    ::pthread_getname_np(::pthread_self(), name, sizeof name);
    const std::lock_guard lock(mutex_);
    calls_.push_back({name, std::move(what)});
    return error;
  }

  mutable std::mutex mutex_;
  std::vector<Call> calls_;
};

}  // namespace deltasync::test
