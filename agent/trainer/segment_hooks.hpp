// The trainer's side of what the agent has: which generation a writer gets, its slots, and when its version is served.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/plans/open_plans.hpp"
#include "agent/trainer/trainer_server.hpp"
#include "agent/versions/arrival.hpp"
#include "agent/versions/bell.hpp"
#include "agent/versions/delta_arrival.hpp"
#include "agent/versions/origin.hpp"
#include "agent/versions/reclaimer.hpp"
#include "agent/versions/version_store.hpp"

namespace deltasync::agent {

/// Only open_segment makes and removes generations, and it is called by one thread at a time: so what it saw of them
/// holds until it returns, but for old ones that the publisher drops. No lock.
class SegmentHooks : public TrainerHooks {
 public:
  /// What is passed by reference outlives it.
  SegmentHooks(const CoreOptions& options, VersionStore& versions, OpenPlans& plans, Bell& bell,
               std::shared_ptr<Reclaimer> reclaimer, Metrics& metrics, Origin& origin, Arrival& arrival,
               DeltaArrival& delta_arrival)
      : options_(options),
        versions_(versions),
        plans_(plans),
        bell_(bell),
        reclaimer_(std::move(reclaimer)),
        metrics_(metrics),
        origin_(origin),
        arrival_(arrival),
        delta_arrival_(delta_arrival) {}

  Result<OpenSegment> open_segment(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                   const ProcessId& asker) override;
  Result<std::uint64_t> grant(std::uint64_t generation, std::uint32_t slot, std::uint32_t writers,
                              ProcessWatch watch) override;
  void writer_gone(std::uint64_t generation, std::uint32_t slot, std::uint64_t grant) override;
  Result<UniqueFd> segment_to_read(std::uint64_t generation) override;
  void segment_changed() override;
  void offloaded(const wire::TrainerNotify& durations) override;
  void relays(std::uint64_t connection, const ProcessId& relay, wire::Parents said) override;
  void relay_gone(std::uint64_t connection) override;
  Status arrives(std::uint64_t connection, std::uint64_t generation, wire::TrainerArrival said,
                 UniqueFd memory) override;
  Status delta_arrives(std::uint64_t connection, std::uint64_t generation, wire::TrainerDelta said) override;
  Status frames_arrive(std::uint64_t connection, wire::TrainerFrames part) override;
  void trains() override;
  Result<std::optional<wire::TrainerReady>> ready(const VersionId& version) override;

  /// ready() fails from now on, and a release under way ends. Any thread.
  void stop() { stop_ = true; }

 private:
  Result<OpenSegment> open_as(const Generation& generation) const;
  Status release_serving(const std::string& why);
  bool is_pending(std::uint64_t epoch) const;

  const CoreOptions& options_;
  VersionStore& versions_;
  OpenPlans& plans_;
  Bell& bell_;
  const std::shared_ptr<Reclaimer> reclaimer_;
  Metrics& metrics_;
  Origin& origin_;
  Arrival& arrival_;
  DeltaArrival& delta_arrival_;
  std::uint64_t epoch_published_ = 0;  // the trainer-setup thread's: of the last version when a writer came
  std::atomic<bool> stop_{false};
};

}  // namespace deltasync::agent
