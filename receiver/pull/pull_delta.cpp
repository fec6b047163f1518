// Delta updates: all frames of all steps, verified against live memory, which nothing is written to before commit().
#include <algorithm>
#include <utility>

#include "base/trace.hpp"
#include "receiver/pull/pull.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/verify.hpp"

namespace deltasync::receiver {
namespace {

/// All records; those of a tile follow each other from the oldest step on.
std::vector<const delta::TileRecord*> sorted_records(const std::vector<StagedStep>& steps) {
  std::vector<const delta::TileRecord*> records;
  for (const StagedStep& step : steps) {
    for (const StagedFrame& frame : step.frames) {
      for (const delta::TileRecord& record : frame.records) records.push_back(&record);
    }
  }
  std::stable_sort(records.begin(), records.end(), [](const auto* a, const auto* b) { return a->tile < b->tile; });
  return records;
}

}  // namespace

Result<Pull::Progress> Pull::run_delta(const wire::PlanReply& reply) {
  // A full update that was under way is of no use any more.
  if (s_.partial.open) {
    s_.target.discard_full();
    s_.partial = PartialUpdate();
  }
  std::vector<StagedStep> steps;
  std::vector<std::uint64_t> digests = s_.target.committed()->digests;
  // Whatever ends it early: those who were told of it must not go on with it.
  struct ToldOfAtEnd {
    CanHandOn* relay;
    ~ToldOfAtEnd() {
      if (relay != nullptr) relay->delta_comes_no_more();
    }
  } told{s_.can.hand_on};
  DS_ASSIGN(const Progress progress, collect_frames(reply, steps, digests));
  if (progress == Progress::replan) return progress;
  const auto base_is_wrong = [this](Error why) {
    // Either the frames or what we hold is wrong, and the frames came through whole: only a full update helps.
    last_ = std::move(why);
    full_only_ = true;
    s_.invalidated = true;
    return Progress::replan;
  };
  if (steps.size() > 1) {
    stage_ = "verifying " + std::to_string(steps.size()) + " delta steps to " + to_string(reply.target);
    if (auto status = verify_chains(steps, digests); !status) {
      const Errc code = status.error().code();
      if (code == Errc::timed_out || code == Errc::cancelled || code == Errc::io) return std::move(status).error();
      DS_ASSIGN(const bool replan, agent_was_wrong(reply));
      if (replan) {
        last_ = std::move(status).error();
        return Progress::replan;
      }
      return base_is_wrong(std::move(status).error());
    }
  }
  if (s_.tiles.root(digests) != reply.target_root) {
    // An agent that has the delta from a relay, and not the version yet, offers it to nobody any more.
    if (s_.tiles.tiles() != 0) doubt(s_.tiles.nth(0));
    DS_ASSIGN(const bool replan, agent_was_wrong(reply));
    if (replan) {
      last_ = Error(Errc::corrupt, "the delta does not lead to the root of " + to_string(reply.target));
      return Progress::replan;
    }
    return base_is_wrong(Error(Errc::corrupt, "the delta does not lead to the root of " + to_string(reply.target)));
  }
  DS_TRY(scrub());
  auto& report = out_.report;
  for (const wire::DeltaStep& step : reply.steps) report.changed += step.changed;
  report.delta_steps = static_cast<std::uint32_t>(reply.steps.size());
  s_.changed_last = report.changed;
  out_.state = TargetState{reply.target, reply.target_root, std::move(digests)};
  out_.steps = std::move(steps);
  told.relay = nullptr;
  return Progress::whole;
}

Result<Pull::Progress> Pull::collect_frames(const wire::PlanReply& reply, std::vector<StagedStep>& steps,
                                            std::vector<std::uint64_t>& digests) {
  stage_ = "fetching the delta to " + to_string(reply.target);
  const bool one_step = reply.steps.size() == 1;
  const std::vector<std::uint64_t>& base = s_.target.committed()->digests;
  const unsigned streams = s_.streams.count();
  std::vector<std::vector<std::pair<std::uint32_t, StagedFrame>>> by_stream(streams);
  ResolvedBudget budget(delta_bytes_max());
  // What others verify against the committed version goes on as it comes; not in exponent classes, which they may not
  // have asked for.
  CanHandOn* const relay = one_step && !compact_ && s_.tiles.is_whole() ? s_.can.hand_on : nullptr;
  const auto sink = [&](std::uint32_t step, StagedFrame frame, wire::TileRange tiles, unsigned stream) -> Status {
    if (one_step) {
      if (auto verified = verify_frame(s_.target, frame, base, digests, budget); !verified) {
        for (const delta::TileRecord& record : frame.records) doubt(record.tile);
        return verified;
      }
      if (relay != nullptr) relay->frame_came(tiles, frame.bytes);
    } else {
      DS_TRY(budget.take_for_classes(class_bytes(s_.layout, frame)));
    }
    by_stream[stream].emplace_back(step, std::move(frame));
    return {};
  };
  std::vector<Item> items;
  std::uint64_t bytes_max = 0;
  for (std::uint32_t i = 0; i < reply.steps.size(); ++i) {
    const wire::DeltaStep& step = reply.steps[i];
    steps.push_back({step.from, step.to, {}});
    if (step.frames == 0) continue;
    bytes_max += frame_bytes_bound(step);
    for (Item& item : frame_items(s_.batches, s_.tiles.ranges(), i, frame_parts(step.frame_bytes, s_.peer.tuning))) {
      items.push_back(std::move(item));
    }
  }
  const auto kind = compact_ ? FrameFetch::Kind::compact_frames : FrameFetch::Kind::frames;
  FrameFetch fetch(s_.layout, s_.tiles, kind, reply.plan, bytes_max, sink, streams);
  if (relay != nullptr) {
    fetch.on_none([relay](wire::TileRange tiles) { relay->frame_came(tiles, {}); });
    relay->delta_comes(reply.steps.front(), reply.target);
  }
  FetchRoundResult round = s_.streams.run(fetch, std::move(items), s_.control.instance(), until_);
  if (round.end == FetchRoundEnd::bad_content) {
    if (s_.tiles.tiles() != 0) doubt(s_.tiles.nth(0));  // a frame that names no tile is asked about, too
    DS_ASSIGN(const bool replan, agent_was_wrong(reply));
    if (replan) {
      count(round, fetch.tallies());
      last_ = round.error;
      return Progress::replan;
    }
    s_.invalidated = true;
  }
  if (round.bytes_never_fit()) {
    round.end = FetchRoundEnd::bad_content;
    full_only_ = true;
  }
  DS_ASSIGN(const Progress progress, settle(round, fetch.tallies()));
  for (auto& list : by_stream) {
    for (auto& [step, frame] : list) steps[step].frames.push_back(std::move(frame));
  }
  return progress;
}

Status Pull::verify_chains(const std::vector<StagedStep>& steps, std::vector<std::uint64_t>& digests) {
  constexpr std::size_t kChainsPerTask = 64;
  const trace::Span span("verify");
  const std::vector<const delta::TileRecord*> records = sorted_records(steps);
  std::vector<std::size_t> starts;  // of each tile's chain in links
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (i == 0 || records[i]->tile != records[i - 1]->tile) starts.push_back(i);
  }
  const std::size_t chains = starts.size();
  starts.push_back(records.size());
  std::vector<std::vector<std::byte>> scratch(s_.pool.size());
  std::vector<double> verify_s(s_.pool.size(), 0);
  const auto verify_some = [&](std::uint64_t task, unsigned worker) -> Status {
    const double before = thread_cpu_s();
    const std::size_t begin = static_cast<std::size_t>(task) * kChainsPerTask;
    for (std::size_t c = begin; c < std::min(begin + kChainsPerTask, chains); ++c) {
      const RecordChain chain(records.data() + starts[c], starts[c + 1] - starts[c]);
      const std::uint64_t tile = chain.front()->tile;
      auto digest = verify_chain(s_.target, chain, digests[tile], scratch[worker]);
      if (!digest) {
        doubt(tile);
        return std::move(digest).error().with_context(tile_name(s_.layout, tile));
      }
      digests[tile] = *digest;
    }
    verify_s[worker] += thread_cpu_s() - before;
    return {};
  };
  const std::uint64_t tasks = (chains + kChainsPerTask - 1) / kChainsPerTask;
  DS_TRY(run_all(s_.pool, tasks, until_, stage_, verify_some));
  for (const double s : verify_s) out_.report.verify_s += s;
  return {};
}

/// Bytes that no update touches are never read by the updates: a few are re-read each time, all in turn.
Status Pull::scrub() {
  const trace::Span span("scrub");
  stage_ = "re-reading tiles of the held version";
  const double before = thread_cpu_s();
  const std::vector<std::uint64_t> list = scrub_list(s_.tiles, s_.options.scrub_tiles, s_.scrubs++);
  DS_ASSIGN(const std::vector<TileMismatch> wrong, attest(s_.target, list, until_, Copies::where_they_can));
  out_.report.verify_s += thread_cpu_s() - before;
  if (wrong.empty()) return {};
  s_.invalidated = true;
  return Error(Errc::corrupt,
               "live memory: " + describe(wrong) + ": somebody wrote to it; the next pull replaces the version");
}

}  // namespace deltasync::receiver
