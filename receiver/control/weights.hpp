// The weights of an engine, as the rollout control uses them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync::control {

/// Which version an update is to bring.
struct UpdateRequest {
  std::string version = {};    ///< its number, or else its label; empty: the newest
  bool verify = false;         ///< live memory is read again after the commit, and repaired
  std::string directory = {};  ///< not empty: no version, but what its safetensors files have
};

/// One call at a time, but for current().
class EngineWeights {
 public:
  virtual ~EngineWeights() = default;

  /// Pulls a version and verifies it beside the live one, which is forgotten if nobody commits it.
  virtual Status stage(const UpdateRequest& request, const CallOptions& call) = 0;
  /// What was staged becomes live.
  virtual Status commit(const CallOptions& call) = 0;
  /// Live memory goes, and nothing touches it from now on.
  virtual Status release(const CallOptions& call) = 0;
  /// It is there again: what it held is written into it, or the newest version. not_found: it never held one, or
  /// nothing can be fetched.
  virtual Status fill(const CallOptions& call) = 0;
  /// Whether the engine must stand still while a version is staged, since that writes live memory.
  virtual bool stages_in_place() const = 0;
  /// What is live; nothing: no whole version. Any thread.
  virtual std::optional<Version> current() const = 0;
  /// (A parameter of live memory, the HF tensor that it has elements of), in order. Any thread.
  virtual std::vector<std::pair<std::string, std::string>> live_names() const = 0;
};

/// `receiver` has a target and outlives it.
std::unique_ptr<EngineWeights> weights_of(Receiver& receiver);

}  // namespace deltasync::control
