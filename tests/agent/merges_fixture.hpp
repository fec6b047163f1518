// A whole agent that stands still before the first delta that it makes, as long as a test wants, and receivers that are
// late.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <utility>
#include <vector>

#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {

/// Work that stops here once until it may go on, so that "while it runs" is an order of events.
class Barrier {
 public:
  ~Barrier() { go_on(); }
  std::function<void()> work() {
    return [this] {
      if (passed_.exchange(true)) return;
      reached_.set_value();
      go_on_.get_future().wait();
    };
  }
  [[nodiscard]] bool reached() {
    return reached_.get_future().wait_until(test_deadline().at()) == std::future_status::ready;
  }
  void go_on() {
    if (!std::exchange(gone_on_, true)) go_on_.set_value();
  }

 private:
  std::atomic<bool> passed_{false};
  bool gone_on_ = false;
  std::promise<void> reached_;
  std::promise<void> go_on_;
};

/// What a receiver holds, and a plan request from it.
struct Late {
  wire::PlanRequest plan;
  std::vector<std::byte> half;
  std::vector<std::uint64_t> digests;
};

class Merges : public AgentTest {
 protected:
  Merges() {
    options_.core.ring_bytes_max = 16u << 20;  // room for all that a test publishes
    options_.core.before_merge = merging_.work();
  }
  ~Merges() override {
    merging_.go_on();
    agent_.reset();  // before the barrier
  }
  const Metrics& metrics() const { return agent_->core().metrics(); }

  /// Starts the agent and serves a first version; `late_from_now()` is where a delay begins.
  void start() {
    start_agent();
    next_version();
  }
  /// As if it had pulled what is served now, and will wait for a merge.
  Late late_from_now() const {
    Late late{ask_from_served(), model_.half, *served()->digests};
    late.plan.wait_ms = 2 * static_cast<std::uint64_t>(std::chrono::milliseconds(kTestLimit).count());
    return late;
  }
  void versions(int count, double density = 0.002) {
    for (int i = 0; i < count; ++i) next_version(density);
  }
  /// Pulls the plan's steps and applies them: the bytes must be the target's.
  void expect_leads_there(Late late, const wire::PlanReply& reply, const std::vector<std::byte>& target) {
    ASSERT_EQ(reply.mode, wire::PlanMode::delta);
    auto stream = client(wire::Role::data);
    const wire::TileRange all{0, model_.layout->tile_count()};
    VersionId at = late.plan.base;
    for (std::uint32_t step = 0; step < reply.steps.size(); ++step) {
      EXPECT_EQ(reply.steps[step].from, at);
      at = reply.steps[step].to;
      const auto frames = stream.frames(wire::GetFrames{reply.plan, step, {all}});
      ASSERT_TRUE(frames) << frames.error().to_string();
      std::uint64_t bytes = 0;
      for (const auto& frame : *frames) bytes += frame.size();
      EXPECT_EQ(bytes, reply.steps[step].frame_bytes);
      apply(late, *frames);
      EXPECT_EQ(delta::root_digest(late.digests), reply.steps[step].to_root);
    }
    EXPECT_EQ(at, reply.target.id);
    EXPECT_EQ(delta::root_digest(late.digests), reply.target_root);
    EXPECT_TRUE(late.half == target);
  }
  void apply(Late& late, const std::vector<std::vector<std::byte>>& frames) {
    const Layout& layout = *model_.layout;
    for (const auto& frame : frames) {
      const auto records = delta::parse_frame(layout, frame);
      ASSERT_TRUE(records) << records.error().to_string();
      for (const auto& record : *records) {
        const Tile tile = tile_of(layout, record.tile);
        const Tensor& tensor = layout.tensors()[tile.tensor];
        const delta::TensorMemory memory{late.half.data() + tensor.offset, tensor.row_bytes()};
        const auto after = delta::apply_tile(layout, record, tile_address(memory, tile, tensor.element_bytes),
                                             tensor.row_bytes(), late.digests[record.tile]);
        ASSERT_TRUE(after) << after.error().to_string();
        late.digests[record.tile] = *after;
      }
    }
  }
  std::uint64_t ring_bytes() const {
    std::uint64_t bytes = 0;
    for (const RingEntryPtr& entry : agent_->core().versions().snapshot()->ring) bytes += entry->delta->frame_bytes;
    return bytes;
  }

  Barrier merging_;
};

}  // namespace deltasync::agent
