// The writer's session. Between two versions it owns nothing but its slot; during a fill it owns what its plan says.
// All bytes go through copy brackets of the half protocol, so that an aborted fill is noticed at the next write and
// the half is never freed under a copy. attach.cpp has what makes and connects it, writer.cpp what fills a version,
// device_write.cpp what of that concerns sources in device memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/writer.hpp"
#include "format/coverage.hpp"
#include "format/wire.hpp"
#include "shm/roles.hpp"
#include "shm/segment.hpp"
#include "writer/agent_link.hpp"
#include "writer/copy.hpp"
#include "writer/copy_streams.hpp"
#include "writer/progress.hpp"
#include "writer/relay_access.hpp"
#include "writer/slot_claim.hpp"

namespace deltasync {

class WriterSession final : public Writer {
 public:
  /// Where devices come from, and what bounds their copies. Tests bring their own.
  struct Devices {
    std::unique_ptr<DeviceFinder> finder;
    DeviceLimits limits;
  };
  /// Writer::attach().
  static Result<std::unique_ptr<Writer>> attach(LayoutPtr layout, const Sidecar& sidecar, WriterOptions options,
                                                Devices devices, const CallOptions& call);
  WriterSession(SlotClaim claim, LayoutPtr layout, WriterOptions options, Devices devices,
                const wire::TrainerHello& hello);
  /// If a device may still write into the segment, what that needs stays behind (orphaned_copies.hpp).
  ~WriterSession() override;

  Status open(Deadline deadline);

  Status register_plan(std::span<const TensorSlice> plan, const CallOptions& call) override;
  Status begin(const Version& version, const CallOptions& call) override;
  using Writer::write;
  Status write(std::uint32_t tensor, const Rect& rect, const Source& source) override;
  Status write(std::span<const SliceSource> batch) override;
  Result<std::uint64_t> write_device(std::span<const SliceSource> batch, const CallOptions& call) override;
  Status wait(std::uint64_t ticket, const CallOptions& call) override;
  Result<OffloadReport> commit(const CallOptions& call) override;
  void abort() noexcept override;
  Status wait_ready(const VersionId& version, const CallOptions& call) override;
  VersionId newest() const override { return fork_guard_.same_process() ? role_->newest() : VersionId{}; }
  std::uint64_t fresh_epoch() const override { return make_epoch(std::max(epoch_heard_, newest().epoch)); }
  std::uint64_t agent_instance() const { return agent_instance_; }
  void take_labels_of_trainers() { labels_of_trainers_ = true; }
  void tell_parents(wire::TrainerParents parents);
  void tell_arrival(const wire::TrainerArrival& arrival, int memory);
  void end_arrival(bool tell) noexcept;
  Status tell_delta(const wire::TrainerDelta& delta);
  Status tell_frames(const wire::TrainerFrames& frames, Deadline deadline);
  /// An agent that was started again hears what the one before knew.
  void look_for_agent();
  std::optional<HeldVersion> held() const;
  std::optional<FillOfHalf> open_fill() const;
  Status change_fill(const std::function<Status(std::span<std::byte> half)>& change);
  const shm::SegmentPath& segment_path() const { return segment_->path(); }
  std::span<const std::byte> filling() const override;
  const LayoutPtr& layout() const override { return layout_; }

 private:
  using Clock = std::chrono::steady_clock;

  /// While it lives this stop ends, with `cancelled`, what waits for the agent or for other writers.
  class StopScope {
   public:
    StopScope(WriterSession& session, const std::stop_token& stop);
    ~StopScope();
    StopScope(const StopScope&) = delete;
    StopScope& operator=(const StopScope&) = delete;

   private:
    void stop_on(const std::stop_token& stop);
    WriterSession& session_;
  };

  Status use(Attached attached);
  /// The same, and the agent hears of the plan that was agreed on. If it fails nobody is connected, so that the next
  /// call asks again, and does not go on in the segment of before, which no agent may look at any more.
  Status take_up(Attached attached, Deadline deadline);
  /// No agent that has the mapped segment is there, and another file bears its name: what is sealed in it reaches
  /// nobody.
  bool is_orphaned() const;
  Status ensure_connected(Deadline deadline);
  Status greet(Deadline deadline);
  Status check_open(const char* call) const;
  Status write_runs(std::span<const SliceSource> batch);
  Status write_groups(std::span<const SliceSource> batch);
  Status write_group(std::span<const SliceSource> group);
  Result<OffloadReport> seal(Deadline deadline);
  void prefetch_tensor(std::span<const SliceSource> group, std::size_t i) const;
  Result<CopyJob> accept(const SliceSource& item);
  Status open_copy_streams(std::span<const SliceSource> batch);
  Status queue_runs(std::span<const SliceSource> batch, Deadline deadline);
  Status queue_run(std::span<const SliceSource> run, Deadline deadline);
  Status settle_before(const Version& version, Deadline deadline);
  void abort_fill(Deadline settle) noexcept;
  void report_copy_form();
  Status check_process() const;
  Status check_source(const Tensor& tensor, const Rect& rect, const Source& source) const;
  std::string who() const { return "writer " + std::to_string(options_.writer_index); }

  // Constant after construction.
  const ForkGuard fork_guard_;
  std::unique_ptr<SlotClaim> claim_;
  const LayoutPtr layout_;
  const WriterOptions options_;

  Copier copier_;
  Coverage coverage_;
  BatchCounter progress_;  ///< of the group that is being written
  std::vector<TensorSlice> plan_;
  bool planned_ = false;
  std::uint64_t epoch_heard_ = 0;     ///< by the agent, when it welcomed this writer
  std::uint64_t agent_instance_ = 0;  ///< likewise
  bool labels_of_trainers_ = false;
  std::stop_token stop_;

  // The open fill.
  std::optional<shm::Fill> fill_;
  OffloadReport report_;
  Clock::time_point began_;
  std::uint64_t began_ns_ = 0;          ///< the same, for the timeline
  std::vector<std::uint32_t> touched_;  ///< by tensor: the fill (counted here) that touched it last
  std::uint32_t fills_ = 0;
  std::vector<CopyJob> jobs_;  ///< of the group that is being written
  bool changed_ = false;       ///< by change_fill(): it is whole, whatever was written
  std::string form_logged_;    ///< that was chosen
  bool failed_ = false;        ///< a write failed: only abort() helps

  std::uint64_t tickets_ = 0;

  // Destroyed last to first: the copy streams give the segment back, the role aborts its fill, the segment is unmapped,
  // the agent hears goodbye.
  AgentLink link_;
  std::shared_ptr<shm::Segment> segment_;
  std::unique_ptr<shm::WriterRole> role_;
  std::unique_ptr<CopyStreams> copy_streams_;
};

}  // namespace deltasync
