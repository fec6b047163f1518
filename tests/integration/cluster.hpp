// Trainer, agent and receiver as real processes on loopback, with the versions of one small model to publish.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/processes.hpp"
#include "deltasync/layout.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::integration {

inline constexpr int kVersions = 6;
inline constexpr auto kLimit = std::chrono::seconds(90);  ///< no wait of a test that passes comes near it

/// What `out/current` holds.
enum : int { kNothing = -1, kTorn = -2 };

/// An agent process, found at the same place after each restart.
class AgentProcess {
 public:
  AgentProcess(std::filesystem::path dir, std::string name) : dir_(std::move(dir)), name_(std::move(name)) {}
  ~AgentProcess() { kill(); }

  void start(const std::vector<std::string>& more = {});
  /// SIGKILL, and reaped.
  void kill();
  bool runs() const noexcept { return child_ != nullptr; }
  pid_t pid() const { return child_->pid(); }
  std::string endpoint() const { return port_.endpoint(); }
  std::uint16_t port() const noexcept { return port_.number(); }
  std::uint16_t http_port() const noexcept { return http_.number(); }
  std::string socket() const { return (dir_ / (name_ + ".sock")).string(); }

 private:
  const std::filesystem::path dir_;
  const std::string name_;
  std::unique_ptr<bench::Child> child_;
  const test::HeldPort port_;
  const test::HeldPort http_;
};

class Cluster : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  void start_agent(const std::vector<std::string>& more = {}) { agent_.start(more); }
  /// Processes that the agent counts as attached trainers.
  std::vector<pid_t> attached() const;
  bool is_attached(const bench::Child& trainer) const;
  void kill_agent() { agent_.kill(); }
  bench::Child publish(int first, int end, int interval_ms, double deadline_s = 60);
  bench::Child follow(const std::string& out) { return follow(out, agent_); }
  bench::Child follow(const std::string& out, const AgentProcess& agent);
  /// Runs to its end: its exit code, or -1 after kLimit or a signal.
  static int wait(bench::Child child);
  int pull_once(const std::string& out) { return pull_once(out, agent_); }
  /// Like pull_once(), and says how: "up_to_date", "delta", "full"; empty if it failed.
  std::string pull_mode(const std::string& out);
  /// Waits until so many deltas lie beside the segment, each whole; false at the limit.
  bool keeps_deltas(std::size_t count) const;
  int pull_once(const std::string& out, const AgentProcess& agent);
  static bench::Child spawn(const std::vector<std::string>& argv);

  std::filesystem::path dir(int version) const { return files_.path() / ("v" + std::to_string(version)); }
  std::filesystem::path out(const std::string& name) const { return files_.path() / name; }
  /// Which version `out/current` holds, kNothing or kTorn (bytes that were never published).
  int current(const std::string& name) const;
  /// Waits until `out/current` holds the version; false at the limit, or if it is ever torn.
  bool becomes(const std::string& name, int version) const;

  test::TempDir files_;
  AgentProcess agent_{files_.path(), "cluster"};

 private:
  void write_versions();

  LayoutPtr layout_;                     ///< as it is published
  std::map<std::string, int> contents_;  ///< bytes of model.safetensors → version
};

}  // namespace deltasync::integration
