// Full updates: tiles of the agent's half into the target's final place, each verified as it arrives. When the plan
// ends early, what is verified stays and is advanced to the next plan's version by delta steps, so that a pull slower
// than the trainer's steps still ends.
#include <algorithm>
#include <atomic>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "delta/codec.hpp"
#include "delta/raw_planes.hpp"
#include "format/packed_layout.hpp"
#include "format/tiling.hpp"
#include "receiver/pull/pull.hpp"
#include "receiver/side_files.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::receiver {

/// Side files belong to the half that is served now, of which no delta comes from before they changed: who writes them
/// asks again before each full transfer, so that no old ones end up beside new tensors.
Result<Pull::Progress> Pull::check_side_files() {
  if (!s_.can.writes_side_files) return Progress::whole;
  stage_ = "fetching the side files";
  auto answer = s_.control.layout(until_.deadline());
  if (!answer.value) {
    FetchRoundResult round;
    round.end = FetchRoundEnd::replan;
    round.error = answer.refused ? answer.refused : answer.broken;
    return settle(round, {});
  }
  DS_ASSIGN(wire::UnpackedLayout now, wire::unpack_layout(*answer.value));
  if (now.layout->digest() != s_.layout.digest()) {
    return Error(Errc::layout_mismatch, "the agent serves another layout");
  }
  DS_TRY(check_same_files(s_.sidecar, wire::take_sidecar(std::move(now))));
  return Progress::whole;
}

Status Pull::open_full() {
  PartialUpdate& partial = s_.partial;
  if (partial.open) return {};
  const trace::Span span("open");
  DS_TRY(s_.target.begin_full(s_.options.full_update_policy, until_));
  partial = PartialUpdate();
  partial.open = true;
  partial.have.assign(static_cast<std::size_t>(s_.layout.tile_count()), 0);
  partial.digests.assign(static_cast<std::size_t>(s_.layout.tile_count()), 0);
  return {};
}

/// An engine may have written its parameters since the last pull ended early. What differs comes again.
Status Pull::reread_partial() {
  constexpr std::uint64_t kTilesPerItem = 32;
  PartialUpdate& partial = s_.partial;
  if (!partial.any() || s_.can.shared == nullptr || !s_.can.shared->shares_memory()) return {};
  const trace::Span span("read_again");
  stage_ = "reading verified tiles again";
  const std::uint64_t tiles = s_.tiles.tiles();
  std::atomic<std::uint64_t> lost{0};
  std::vector<std::vector<std::byte>> scratch(s_.pool.size());
  const auto read_some = [&](std::uint64_t item, unsigned worker) -> Status {
    const std::uint64_t end = std::min((item + 1) * kTilesPerItem, tiles);
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      const Tile tile = tile_of(s_.layout, s_.tiles.nth(i));
      if (partial.have[tile.index] == 0) continue;
      DS_ASSIGN(const TileRows rows, s_.target.full_tile(tile, scratch[worker]));
      const std::uint32_t row_bytes = tile.rect.cols * s_.layout.tensors()[tile.tensor].element_bytes;
      if (delta::tile_digest(rows.first, rows.row_stride, tile.rect.rows, row_bytes) == partial.digests[tile.index])
        continue;
      partial.have[tile.index] = 0;
      ++lost;
    }
    return {};
  };
  DS_TRY(run_all(s_.pool, (tiles + kTilesPerItem - 1) / kTilesPerItem, until_, stage_, read_some));
  if (lost != 0) log::warn("receiver verified_tiles_were_overwritten tiles={}", lost.load());
  return {};
}

Result<Pull::Progress> Pull::run_full(const wire::PlanReply& reply) {
  DS_ASSIGN(Progress progress, check_side_files());
  if (progress == Progress::replan) return progress;
  stage_ = "opening a full update to " + to_string(reply.target);
  DS_TRY(open_full());
  stage_ = "fetching the digests of " + to_string(reply.target);
  auto digests = s_.control.digests(reply.plan, s_.tiles.tiles(), reply.target_root, until_.deadline());
  if (!digests.value) {
    FetchRoundResult round;
    round.end = FetchRoundEnd::replan;
    round.error = digests.refused ? digests.refused : digests.broken;
    return settle(round, {});
  }
  if (!s_.tiles.is_whole()) {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(s_.layout.tile_count()), 0);
    s_.tiles.scatter(*digests.value, all);
    digests.value = std::move(all);
  }
  CanHandOn* const relay = s_.can.hand_on;
  const bool other = s_.partial.version != reply.target.id || s_.partial.root != reply.target_root;
  if (relay != nullptr && other) relay->comes_no_more();
  DS_ASSIGN(progress, advance_partial(reply, *digests.value));
  if (progress == Progress::replan) return progress;
  adopt_digests(reply, std::move(*digests.value));
  if (relay != nullptr) relay->comes(reply.target, reply.target_root, s_.partial.digests, s_.partial.have);
  DS_ASSIGN(progress, fetch_missing(reply));
  if (progress == Progress::replan) return progress;
  DS_ASSIGN(progress, repair_missing(reply));
  if (progress == Progress::replan) return progress;
  out_.state.version = reply.target;
  out_.state.root = reply.target_root;
  out_.state.digests = std::move(s_.partial.digests);
  return Progress::whole;
}

Result<Pull::Progress> Pull::advance_partial(const wire::PlanReply& reply,
                                             std::span<const std::uint64_t> target_digests) {
  PartialUpdate& partial = s_.partial;
  if (partial.version == reply.target.id || !partial.any()) return Progress::whole;
  // Without a chain of steps from what we hold, only the tiles that did not change at all are of use.
  std::size_t next = 0;
  while (next < reply.steps.size() && reply.steps[next].from != partial.version) ++next;
  for (; next < reply.steps.size(); ++next) {
    const wire::DeltaStep& step = reply.steps[next];
    if (step.from != partial.version) break;
    const Ranges stale = collect_ranges(s_.tiles.ranges(), [&](std::uint64_t t) {
      return partial.have[t] != 0 && partial.digests[t] != target_digests[t];
    });
    if (!stale.empty()) {
      stage_ = "advancing verified tiles to " + to_string(step.to);
      DS_ASSIGN(const Progress progress, advance_one_step(reply, static_cast<std::uint32_t>(next), stale));
      if (progress == Progress::replan) return progress;
    }
    partial.version = step.to;
    partial.root = step.to_root;
    ++out_.report.delta_steps;
  }
  return Progress::whole;
}

/// All frames of the step first, then all changes: a round that ends early leaves every tile as it was. Where frames
/// do not come through, their tiles count as missing.
Result<Pull::Progress> Pull::advance_one_step(const wire::PlanReply& reply, std::uint32_t step, const Ranges& ranges) {
  const wire::DeltaStep& named = reply.steps[step];
  std::vector<std::vector<StagedFrame>> by_stream(s_.streams.count());
  FrameFetch fetch(
      s_.layout, s_.tiles, FrameFetch::Kind::frames, reply.plan, frame_bytes_bound(named),
      [&](std::uint32_t, StagedFrame frame, wire::TileRange, unsigned stream) -> Status {
        by_stream[stream].push_back(std::move(frame));
        return {};
      },
      s_.streams.count());
  const std::uint64_t parts = frame_parts(named.frame_bytes, s_.peer.tuning);
  const FetchRoundResult round =
      s_.streams.run(fetch, frame_items(s_.batches, ranges, step, parts), s_.control.instance(), until_);
  PartialUpdate& partial = s_.partial;
  if (round.bytes_never_fit()) {
    count(round, fetch.tallies());
    last_ = round.error;
    for (const wire::TileRange& range : ranges) {
      std::fill(partial.have.begin() + static_cast<std::ptrdiff_t>(range.first),
                partial.have.begin() + static_cast<std::ptrdiff_t>(range.end), std::uint8_t{0});
    }
    return Progress::whole;
  }
  DS_ASSIGN(const Progress progress, settle(round, fetch.tallies()));
  if (progress == Progress::replan) return progress;

  std::vector<const StagedFrame*> frames;
  for (const auto& list : by_stream) {
    for (const StagedFrame& frame : list) frames.push_back(&frame);
  }
  std::vector<std::vector<std::byte>> scratch(s_.pool.size());
  const auto apply = [&](std::uint64_t i, unsigned worker) -> Status {
    for (const delta::TileRecord& record : frames[i]->records) {
      const Tile tile = tile_of(s_.layout, record.tile);
      DS_ASSIGN(const TileRows rows, s_.target.full_tile(tile, scratch[worker]));
      const auto digest =
          delta::apply_tile(s_.layout, record, rows.first, rows.row_stride, partial.digests[record.tile]);
      // A tile that does not take the step is fetched again like any other that is missing.
      if (digest) {
        DS_TRY(s_.target.put_tile(tile, rows));
        partial.digests[record.tile] = *digest;
      } else {
        partial.have[record.tile] = 0;
      }
    }
    return {};
  };
  // Cut short, some tiles are a step ahead of the others: each still has the digest that is kept for it.
  DS_TRY(run_all(s_.pool, frames.size(), until_, stage_, apply));
  DS_TRY(until_.check(stage_));
  return Progress::whole;
}

void Pull::adopt_digests(const wire::PlanReply& reply, std::vector<std::uint64_t> digests) {
  PartialUpdate& partial = s_.partial;
  for (std::size_t t = 0; t < digests.size(); ++t) {
    if (partial.digests[t] != digests[t]) partial.have[t] = 0;
  }
  partial.version = reply.target.id;
  partial.root = reply.target_root;
  partial.digests = std::move(digests);
}

Ranges Pull::missing() const {
  return collect_ranges(s_.tiles.ranges(), [&](std::uint64_t t) { return s_.partial.have[t] == 0; });
}

/// An agent's memory on this host is no link. One that is not known is measured with the first tiles. Packing has to
/// prove that it is faster than what it was chosen for, portion by portion: the agent's threads may have more to do
/// than they said. What does not come right is asked for again by repair_missing().
Result<Pull::Progress> Pull::fetch_missing(const wire::PlanReply& reply) {
  Ranges rest = missing();
  const std::uint64_t total = s_.tiles.bytes();
  s_.progress.begin(to_string(reply.target), total - bytes_of_tiles(s_.layout, rest), total);
  if (!rest.empty()) {
    DS_ASSIGN(const std::optional<Progress> copied, fetch_local(reply, rest));
    if (copied) return *copied;
  }
  DS_ASSIGN(Progress progress, probe_link(reply, rest));
  if (progress == Progress::replan) return progress;
  while (!rest.empty() && packing_pays(reply, rest)) {
    const std::uint64_t portion_bytes = std::max<std::uint64_t>(1, s_.peer.tuning.packed_portion_bytes);
    const Ranges portion = take_front(s_.layout, rest, portion_bytes);
    const auto begin = std::chrono::steady_clock::now();
    DS_ASSIGN(progress, fetch_packed(reply, portion));
    if (progress == Progress::replan) return progress;
    const double plain_s = static_cast<double>(bytes_of_tiles(s_.layout, portion)) / s_.link.rate().bytes_per_s;
    if (seconds_since(begin) > plain_s) break;
  }
  if (rest.empty()) return Progress::whole;
  return fetch_plain(reply, rest);
}

/// Moves bands that are too long for the target to others.
void move_long_bands(const Layout& layout, Target& target, Ranges& bands, Ranges& others) {
  Ranges kept;
  for (wire::TileRange range : bands) {
    while (range.first < range.end) {
      const std::uint32_t index = layout.tensor_of_tile(range.first);
      const Tensor& tensor = layout.tensors()[index];
      const std::uint64_t end = std::min(range.end, tensor.first_tile + tensor.tile_count);
      Ranges& list = bands_are_too_long(layout, target, index) ? others : kept;
      if (!list.empty() && list.back().end == range.first) {
        list.back().end = end;
      } else {
        list.push_back({range.first, end});
      }
      range.first = end;
    }
  }
  std::sort(others.begin(), others.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  bands = std::move(kept);
}

/// Bands of which every tile is subscribed to come as they lie in the half; of others each tile comes alone. So do
/// those that are missing in part, where the tiles that are there have been handed on: these are not written again.
Result<Pull::Progress> Pull::fetch_plain(const wire::PlanReply& reply, const Ranges& ranges) {
  stage_ = "fetching tiles of " + to_string(reply.target);
  Ranges bands;
  Ranges others;
  split_bands(s_.layout, s_.can.hand_on != nullptr ? ranges : s_.tiles.ranges(), ranges, bands, others);
  move_long_bands(s_.layout, s_.target, bands, others);
  DS_ASSIGN(Progress progress, fetch_bands(reply, bands));
  if (progress == Progress::replan || others.empty()) return progress;
  return fetch_raw(reply, others, 1 + bytes_of_tiles(s_.layout, others) / s_.peer.tuning.item_bytes);
}

Result<Pull::Progress> Pull::fetch_bands(const wire::PlanReply& reply, const Ranges& bands) {
  PartialUpdate& partial = s_.partial;
  if (bands.empty()) return Progress::whole;
  // Few bytes are divided among all streams too: a link is as fast as they are together.
  constexpr std::uint64_t kItemBytesMin = 1u << 20;
  const std::uint64_t share = std::max(kItemBytesMin, bytes_of_tiles(s_.layout, bands) / s_.streams.count());
  std::vector<Item> items = extent_items(s_.layout, bands, std::min(s_.peer.tuning.item_bytes, share));
  // A band comes as a whole: its verified tiles are overwritten, and count again once they are verified again.
  for (const Item& item : items) {
    std::fill(partial.have.begin() + static_cast<std::ptrdiff_t>(item.ranges.front().first),
              partial.have.begin() + static_cast<std::ptrdiff_t>(item.ranges.front().end), std::uint8_t{0});
  }
  ExtentFetch fetch(s_.layout, s_.target, partial.digests, partial.have, reply.plan, s_.peer.tuning, s_.progress,
                    s_.streams.count());
  const FetchRoundResult round = s_.streams.run(fetch, std::move(items), s_.control.instance(), until_);
  if (reply.arriving == 0) learn(round, false);  // else it comes as fast as it comes to the agent
  return settle(round, fetch.tallies());
}

/// Tiles whose bytes have their digests are had after it.
Result<Pull::Progress> Pull::fetch_raw(const wire::PlanReply& reply, const Ranges& ranges, std::uint64_t items,
                                       FrameFetch::Kind kind) {
  PartialUpdate& partial = s_.partial;
  const auto sink = [&](std::uint32_t, const StagedFrame& frame, wire::TileRange, unsigned) -> Status {
    for (const delta::TileRecord& record : frame.records) {
      if (!delta::traits(record.codec).whole_tile || record.digest_after != partial.digests[record.tile]) continue;
      const delta::TileShape shape = delta::tile_shape(s_.layout, record.tile);
      const auto whole = delta::whole_tile_bytes(shape, record);
      if (!whole) continue;
      const std::size_t row_bytes = shape.row_bytes();
      if (delta::tile_digest(whole->data(), row_bytes, shape.rows, row_bytes) != record.digest_after) continue;
      const TileRows rows{const_cast<std::byte*>(whole->data()), row_bytes};  // only read
      DS_TRY(put(tile_of(s_.layout, record.tile), rows));
      partial.have[record.tile] = 1;
      if (s_.can.hand_on != nullptr) s_.can.hand_on->came({&record.tile, 1});
      s_.progress.add(std::uint64_t{shape.rows} * row_bytes);
    }
    return {};
  };
  FrameFetch fetch(s_.layout, s_.tiles, kind, reply.plan, raw_bytes_bound(tiles_in(ranges)), sink, s_.streams.count());
  const FetchRoundResult round =
      s_.streams.run(fetch, frame_items(s_.batches, ranges, 0, items), s_.control.instance(), until_);
  if (kind == FrameFetch::Kind::packed_tiles) learn(round, true);
  return settle(round, fetch.tallies());
}

Result<Pull::Progress> Pull::repair_missing(const wire::PlanReply& reply) {
  for (std::uint32_t attempt = 0;; ++attempt) {
    const Ranges wrong = missing();
    if (wrong.empty()) return Progress::whole;
    if (attempt == 0) {
      for (const wire::TileRange& range : wrong) {
        for (std::uint64_t tile = range.first; tile < range.end; ++tile) doubt(tile);
      }
      DS_ASSIGN(const bool replan, agent_was_wrong(reply));
      if (replan) {
        last_ = Error(Errc::corrupt, tile_name(s_.layout, wrong.front().first) + " differs from its digest");
        return Progress::replan;
      }
    }
    stage_ = "repairing " + tile_name(s_.layout, wrong.front().first);
    if (attempt == s_.peer.tuning.tile_attempts) {
      FetchRoundResult round;
      round.end = FetchRoundEnd::bad_content;
      round.error = Error(Errc::corrupt, tile_name(s_.layout, wrong.front().first) + " differs from its digest after " +
                                             std::to_string(attempt) + " more copies");
      return settle(round, {});
    }
    DS_ASSIGN(const Progress progress, fetch_raw(reply, wrong, s_.streams.count()));
    if (progress == Progress::replan) return progress;
    out_.report.repaired_tiles += static_cast<std::uint32_t>(tiles_in(wrong) - tiles_in(missing()));
  }
}

}  // namespace deltasync::receiver
