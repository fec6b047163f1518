// Trainer, agent and receiver as real processes on loopback, with the versions of one small model to publish.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "bench/processes.hpp"
#include "deltasync/hf.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::integration {

inline constexpr int kVersions = 6;
inline constexpr auto kLimit = std::chrono::seconds(90);  ///< no wait of a test that passes comes near it

/// What `out/current` holds.
enum : int { kNothing = -1, kTorn = -2 };

class Cluster : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  void start_agent(const std::vector<std::string>& more = {});
  /// Processes that the agent counts as attached trainers.
  std::vector<pid_t> attached() const;
  bool is_attached(const bench::Child& trainer) const;
  /// SIGKILL, and reaped.
  void kill_agent();
  bench::Child publish(int first, int end, int interval_ms, double deadline_s = 60);
  bench::Child follow(const std::string& out);
  /// Runs to its end: its exit code, or -1 after kLimit or a signal.
  static int wait(bench::Child child);
  int pull_once(const std::string& out);

  std::filesystem::path dir(int version) const { return files_.path() / ("v" + std::to_string(version)); }
  std::filesystem::path out(const std::string& name) const { return files_.path() / name; }
  /// Which version `out/current` holds, kNothing or kTorn (bytes that were never published).
  int current(const std::string& name) const;
  /// Waits until `out/current` holds the version; false at the limit, or if it is ever torn.
  bool becomes(const std::string& name, int version) const;

  test::TempDir files_;
  std::unique_ptr<bench::Child> agent_;

 private:
  std::string socket() const { return (files_.path() / "agent.sock").string(); }
  void write_versions();

  std::map<std::string, int> contents_;  ///< bytes of model.safetensors → version
  unsigned port_ = 0;
  unsigned http_port_ = 0;
};

}  // namespace deltasync::integration
