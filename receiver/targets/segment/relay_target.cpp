#include "receiver/targets/segment/relay_target.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/segment/half_copy.hpp"
#include "receiver/targets/segment/half_patch.hpp"
#include "receiver/targets/segment/hand_over.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/tile_memory.hpp"

namespace deltasync::relay {
namespace {

constexpr std::uint64_t kDigestTilesPerItem = 32;
constexpr auto kLookLimit = std::chrono::seconds(1);           ///< for looking again, so that it holds up no version
constexpr std::uint64_t kLookTiles = 4096;                     ///< between two looks at the time
constexpr auto kServedSlice = std::chrono::milliseconds(500);  ///< between two looks at the segment

}  // namespace

RelayTarget::RelayTarget(LayoutPtr layout, std::unique_ptr<Writer> writer, Options options)
    : layout_(std::move(layout)),
      writer_(std::move(writer)),
      options_(std::move(options)),
      staging_(*layout_, *writer_),
      arriving_(*writer_) {}

// ---- what the segment holds ----------------------------------------------------------------------------------------

/// A relay that was restarted goes on from what it has handed on.
Status RelayTarget::open(ThreadPool& pool, const CallContext& until) {
  pool_ = &pool;
  const auto held = held_version(*writer_);
  if (!held) return {};
  TargetState state{held->version, {}, std::vector<std::uint64_t>(static_cast<std::size_t>(layout_->tile_count()))};
  const std::uint64_t items = (layout_->tile_count() + kDigestTilesPerItem - 1) / kDigestTilesPerItem;
  const auto digest_some = [&](std::uint64_t item, unsigned) -> Status {
    const std::uint64_t end = std::min((item + 1) * kDigestTilesPerItem, layout_->tile_count());
    for (std::uint64_t i = item * kDigestTilesPerItem; i < end; ++i) {
      state.digests[i] = delta::tile_digest(*layout_, held->bytes, i);
    }
    return {};
  };
  DS_TRY(run_all(pool, items, until, "reading the version in the segment", digest_some));
  state.root = delta::root_digest(state.digests);
  sealed_[held->fill.half] = {held->fill.sequence, state.version.id, state.root, state.digests};
  committed_ = std::move(state);
  live_ = held->bytes;
  log::info("relay resumes version=\"{}\" root={}", to_string(committed_->version), to_string(committed_->root));
  return {};
}

/// The writer may have mapped another segment since the last look: then what was committed is not there any more.
Status RelayTarget::look_at_segment() {
  if (!committed_ || own_) return {};
  const auto held = held_version(*writer_);
  if (held && held->version.id == committed_->version.id) {
    live_ = held->bytes;
    return {};
  }
  Error lost(Errc::aborted, "the agent has a segment without " + to_string(committed_->version) +
                                (held ? ", with " + to_string(held->version) : std::string()));
  invalidate();
  return lost;
}

TileRows RelayTarget::tile_in(ByteSpan half, const Tile& tile) const {
  const Tensor& tensor = layout_->tensors()[tile.tensor];
  // Of live memory only read.
  auto* const first = const_cast<std::byte*>(half.data()) + tensor.offset;
  return tile_rows(*layout_, tile, {first, static_cast<std::size_t>(tensor.row_bytes())});
}

Result<TileRows> RelayTarget::live_tile(const Tile& tile, std::vector<std::byte>& /*they lie as in a half*/) const {
  if (!committed_) return TileRows{};
  return tile_in(live_, tile);
}

void RelayTarget::invalidate() noexcept {
  committed_.reset();
  own_.reset();
  live_ = {};
  for (Sealed& half : sealed_) half = {};
  last_.clear();
  look_left_ = 0;
}

/// Who waits for an agent that has another segment by now waits in vain: that is looked at now and then.
Status RelayTarget::look_at_served(const CallContext& until) {
  const VersionId version = committed_->version.id;
  for (;;) {
    Status served = writer_->wait_ready(version, until.earlier(Deadline::after(kServedSlice)));
    DS_TRY(look_at_segment());
    if (served.ok() || until.over()) return served;
    const Errc code = served.error().code();
    if (code != Errc::timed_out && code != Errc::connection) return served;
  }
}

Status RelayTarget::wait_served(const CallContext& until) {
  if (!committed_) return Error(Errc::invalid_argument, "the relay has committed nothing");
  const std::string version = to_string(committed_->version);
  if (own_) {
    return Error(Errc::corrupt, "the segment has " + version +
                                    " with other bytes than it was published with; the next version replaces them");
  }
  Status served = look_at_served(until);
  if (served.ok()) {
    const bool known = std::exchange(known_served_, true);
    return known ? look_again(until) : served;  // first the news, then what may take a while
  }
  const Errc code = served.error().code();
  if (code == Errc::corrupt) invalidate();
  const char* remedy = "";
  if (code == Errc::connection) remedy = ": it is away: start it again";
  if (code == Errc::timed_out) remedy = ": it is stopped, or has more to do than it can: see its log";
  if (code == Errc::corrupt) remedy = ": somebody wrote to it, or memory is failing; the next version comes whole";
  if (code == Errc::aborted) remedy = ": it was started again without its segment: the model comes whole";
  return std::move(served).with_context("the agent on " + options_.agent_socket + " does not serve " + version +
                                        remedy);
}

// ---- full ----------------------------------------------------------------------------------------------------------

/// Tiles of a full update may come more than once, and be advanced to a later version before they are whole; what a
/// fill has is written once and bears one version's name. So they wait elsewhere.
Status RelayTarget::begin_full(FullUpdatePolicy policy, const CallContext& until) {
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  if (staging_) return Error(Errc::invalid_argument, "a full update is open already");
  if (committed_ && policy == FullUpdatePolicy::refuse) {
    return Error(Errc::no_space, "a full update over the live version " + to_string(committed_->version) +
                                     " needs a second copy in host memory, which the policy refuses");
  }
  // Where something is served already a delta may do for those who have it: they wait for the commit.
  const bool first = !committed_ && !held_version(*writer_);
  return staging_.open(first, *pool_, until).with_context("memory for a full update");
}

Result<TileRows> RelayTarget::full_tile(const Tile& tile, std::vector<std::byte>& /*changed in place*/) {
  if (!staging_) return TileRows{};
  return tile_in(staging_.span(), tile);
}

Status RelayTarget::put_tile(const Tile& tile, const TileRows& rows) {
  if (staging_) copy_tile_rows(*layout_, tile, rows, tile_in(staging_.span(), tile));
  return {};
}

std::byte* RelayTarget::full_rows(std::uint32_t tensor) {
  return staging_ ? staging_.span().data() + layout_->tensors()[tensor].offset : nullptr;
}

Status RelayTarget::commit_full(TargetState state, Deadline deadline) {
  if (!staging_) return Error(Errc::invalid_argument, "no full update is open");
  DS_TRY(check_state(*layout_, TileSet::whole(*layout_), state));
  if (const auto held = held_version(*writer_); held && held->version.id == state.version.id) {
    log::error(
        "relay keeps_aside version=\"{}\" reason=\"the segment has it with other bytes than it was "
        "published with; the next version replaces them\"",
        to_string(state.version));
    live_ = staging_.span();
    own_ = staging_.take();
    committed_ = std::move(state);
    return {};
  }
  return publish(std::move(state), {}, deadline);
}

// ---- delta ---------------------------------------------------------------------------------------------------------

void RelayTarget::delta_comes(const wire::DeltaStep& step, const Version& to) {
  if (!committed_ || own_) return arriving_.give_up();  // of own_ the segment has other bytes
  arriving_.begin({layout_->digest(), committed_->version, to, committed_->root, step.to_root, step.frames,
                   step.frame_bytes, step.changed});
}

Status RelayTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (staging_) return Error(Errc::invalid_argument, "a full update is open");
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  DS_TRY(check_steps(*layout_, TileSet::whole(*layout_), committed(), steps, state, *pool_));
  return publish(std::move(state), std::move(steps), deadline);
}

// ---- commit --------------------------------------------------------------------------------------------------------

/// From the full update that waits, else from the committed version. On error the version is dropped, and nobody has
/// seen it.
Status RelayTarget::publish(TargetState state, std::vector<StagedStep> steps, Deadline deadline) {
  Status begun = writer_->begin(state.version, deadline.earlier(Deadline::after(options_.guard_limit)));
  // Whatever came of it, it may have mapped another segment in place of the one that `live_` is in.
  Status there = look_at_segment();
  if (!begun.ok()) return begun;
  Status filled = there.ok() || staging_ ? fill(state, steps, deadline) : std::move(there);
  if (!filled.ok()) {
    writer_->abort();
    withdraw_delta(*writer_);
    return filled;
  }
  last_ = own_ || staging_ ? std::vector<StagedStep>() : std::move(steps);
  committed_ = std::move(state);
  own_.reset();
  staging_.committed();
  staging_.release();
  return look_at_segment();
}

/// Nothing was written to the segment but by this target: the half has the version from which last_ leads to the
/// committed one, which the other half has.
bool RelayTarget::is_before_last(unsigned half, std::uint64_t sequence) const {
  const Sealed& there = sealed_[half];
  const Sealed& newer = sealed_[1 - half];
  return !own_ && !staging_ && !last_.empty() && there.sequence != 0 && newer.sequence == sequence - 1 &&
         newer.root == committed_->root && newer.version == committed_->version.id &&
         there.version == last_.front().from;
}

Status RelayTarget::fill(const TargetState& state, const std::vector<StagedStep>& steps, Deadline deadline) {
  const FillOfHalf open = *open_fill(*writer_);
  const bool known = is_before_last(open.half, open.sequence);
  const Sealed there = std::exchange(sealed_[open.half], {});
  const bool handed = !own_ && !staging_ && hand_over(*layout_, *writer_, *committed_, state, steps);
  // An agent that takes the digests of a half itself gets one of which all was compared.
  const bool in_place = known && handed;
  if (in_place) {
    TilePatches patches(*layout_, last_);
    patches.add(*layout_, steps);
    DS_TRY(patch_half(*layout_, *writer_, *pool_, patches, there.digests, state.digests, deadline));
  } else {
    const ByteSpan base = staging_ ? ByteSpan(staging_.span()) : live_;
    const std::vector<std::uint64_t>& before = staging_ ? state.digests : committed_->digests;
    const TilePatches patches(*layout_, steps);
    HalfCopy copy(*layout_, *writer_, *pool_, options_.written);
    DS_TRY(copy.run({base, before, patches, state.digests}, deadline));
  }
  DS_TRY(writer_->commit(deadline));
  sealed_[open.half] = {open.sequence, state.version.id, state.root, state.digests};
  look_left_ = in_place ? layout_->tile_count() : 0;
  known_served_ = false;
  return {};
}

/// A half that was changed in place was not read again before it was sealed. That is done once it is served, as far as
/// the time goes; the rest after the next version.
Status RelayTarget::look_again(const CallContext& until) {
  if (look_left_ == 0) return {};
  const trace::Span span("look again", committed_->version.id);
  const Deadline limit = Deadline::after(kLookLimit);
  while (look_left_ != 0 && !until.over() && !limit.passed()) {
    const std::uint64_t first = look_next_ % layout_->tile_count();
    const std::uint64_t count = std::min({kLookTiles, look_left_, layout_->tile_count() - first});
    const Status looked = run_all(*pool_, count, [&](std::uint64_t i, unsigned) -> Status {
      const std::uint64_t tile = first + i;
      if (delta::tile_digest(*layout_, live_, tile) == committed_->digests[tile]) return {};
      return Error(Errc::corrupt, describe_tile(*layout_, tile) + " of " + to_string(committed_->version) +
                                      " differs from its digest in the segment: somebody wrote to it, or memory is " +
                                      "failing; the next version comes whole");
    });
    if (!looked) {
      invalidate();
      return looked;
    }
    look_next_ = first + count;
    look_left_ -= count;
  }
  return {};
}

}  // namespace deltasync::relay

namespace deltasync {

Result<std::unique_ptr<Target>> make_relay_target(LayoutPtr layout, const Sidecar& sidecar,
                                                  const RelayTargetOptions& options, const CallOptions& call) {
  WriterOptions writer_options;
  writer_options.agent_socket = options.agent_socket;
  writer_options.threads = options.threads;
  writer_options.name = options.name;
  auto writer = Writer::attach(layout, sidecar, std::move(writer_options), call);
  if (!writer.ok()) return std::move(writer).error().with_context("relay target");
  if (options.pulled_from != 0 && options.pulled_from == agent_instance(**writer)) {
    return Error(Errc::invalid_argument, "relay target: the agent on " + options.agent_socket +
                                             " is the very agent that is pulled from: name the socket of this node's "
                                             "own agent, and the address of the one that the trainer writes to");
  }
  take_labels_of_trainers(**writer);
  return std::unique_ptr<Target>(new relay::RelayTarget(
      std::move(layout), *std::move(writer), {options.guard_limit, options.agent_socket, {}, options.advertise}));
}

}  // namespace deltasync
