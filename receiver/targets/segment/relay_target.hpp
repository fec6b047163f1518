// A target whose committed version is the newest one in the segment of another agent, and whose commit is a fill of
// that segment's free half: begin, write, read again, seal.
//
// What is where:
//   the segment  the committed version. This process is the segment's only writer, so the half stays as it is until
//                the target itself commits the next one.
//   staging_     a full update until its commit; the first one is handed on while it comes
//   arriving_    the delta to the next one, handed on while it comes
//   last_        the delta to the committed version, from the one that the other half has still: where both are known,
//                a commit changes that half in place, instead of copying the model
//   own_         the committed version where the segment has the same one with other bytes: somebody wrote to it. It
//                cannot be written there again (versions grow), but it is a valid base for the next one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/writer.hpp"
#include "format/segment.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/segment/arriving_delta.hpp"
#include "receiver/targets/segment/arriving_update.hpp"
#include "receiver/targets/segment/relay.hpp"
#include "receiver/targets/segment/tile_patches.hpp"
#include "receiver/targets/target.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {

class RelayTarget final : public Target, public CanLendRows, public CanHandOn {
 public:
  struct Options {
    std::chrono::nanoseconds guard_limit;
    std::string agent_socket;       ///< for messages
    std::function<void()> written;  ///< for tests: as HalfCopy's
    std::string advertise = {};     ///< RelayTargetOptions::advertise
  };
  /// The writer's session is new, and this target's alone.
  RelayTarget(LayoutPtr layout, std::unique_ptr<Writer> writer, Options options);

  const LayoutPtr& layout() const override { return layout_; }
  /// A commit is final: receivers may have it. The agent serves the side files with the layout.
  TargetCapabilities capabilities() override {
    TargetCapabilities can;
    can.takes_decoded = true;
    can.writes_side_files = true;
    can.rows = this;
    can.hand_on = this;
    return can;
  }
  Status open(ThreadPool& pool, const CallContext& until) override;
  const TargetState* committed() const override { return committed_ ? &*committed_ : nullptr; }
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  void invalidate() noexcept override;
  Status begin_full(FullUpdatePolicy policy, const CallContext& until) override;
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  Status put_tile(const Tile& tile, const TileRows& rows) override;
  std::byte* full_rows(std::uint32_t tensor) override;
  Status commit_full(TargetState state, Deadline deadline) override;
  void discard_full() noexcept override { staging_.release(); }
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;
  Status wait_served(const CallContext& until) override;
  void comes(const Version& version, const Digest128& root, std::span<const std::uint64_t> digests,
             std::span<const std::uint8_t> have) override {
    staging_.announce(version, root, digests, have);
  }
  void came(std::span<const std::uint64_t> tiles) override { staging_.came(tiles); }
  void comes_no_more() noexcept override { staging_.give_up(); }
  void delta_comes(const wire::DeltaStep& step, const Version& to) override;
  void frame_came(const wire::TileRange& tiles, ByteSpan frame) override { arriving_.came(tiles, frame); }
  void delta_comes_no_more() noexcept override { arriving_.give_up(); }
  std::string advertised() const override { return options_.advertise; }
  std::uint64_t agent_instance() const override { return deltasync::agent_instance(*writer_); }
  void tell_parents(wire::Parents parents) override { deltasync::tell_parents(*writer_, std::move(parents)); }

 private:
  Status look_at_served(const CallContext& until);
  TileRows tile_in(ByteSpan half, const Tile& tile) const;
  Status publish(TargetState state, std::vector<StagedStep> steps, Deadline deadline);
  Status fill(const TargetState& state, const std::vector<StagedStep>& steps, Deadline deadline);
  bool is_before_last(unsigned half, std::uint64_t sequence) const;
  Status look_again(const CallContext& until);
  Status look_at_segment();

  /// What this target has sealed into a half.
  struct Sealed {
    std::uint64_t sequence = 0;  ///< of the fill; 0: nothing that is known
    VersionId version;
    Digest128 root;
    std::vector<std::uint64_t> digests;
  };

  const LayoutPtr layout_;
  const std::unique_ptr<Writer> writer_;
  const Options options_;
  ThreadPool* pool_ = nullptr;
  std::optional<TargetState> committed_;
  ByteSpan live_;              ///< of the committed version; empty if there is none
  std::shared_ptr<void> own_;  ///< the memory
  ArrivingUpdate staging_;
  ArrivingDelta arriving_;
  Sealed sealed_[shm::kHalves];
  std::vector<StagedStep> last_;  ///< to the committed version; empty: unknown
  bool known_served_ = false;
  std::uint64_t look_next_ = 0;  ///< of the tiles that were changed in place: the one that is looked at next
  std::uint64_t look_left_ = 0;  ///< and how many are left
};

}  // namespace deltasync::relay
