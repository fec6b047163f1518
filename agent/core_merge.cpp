// Merged deltas for receivers that are several versions late: which plans wait for one, and the thread that makes them.
#include <algorithm>
#include <new>
#include <utility>

#include "agent/core.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "delta/frame.hpp"

namespace deltasync::agent {
namespace {

using Clock = std::chrono::steady_clock;

MergeKey key_of(const std::vector<RingEntryPtr>& chain, std::size_t steps) {
  const delta::Delta& first = *chain.front()->delta;
  return {first.from, first.from_root, chain[steps - 1]->delta->to};
}

}  // namespace

// ---- plans -------------------------------------------------------------------------------------------------------

/// Those of a delta, or those that may become one by merging.
std::vector<RingEntryPtr> AgentCore::ring_steps_locked(const Decision& decision) const {
  const auto first = snapshot_->ring.begin() + static_cast<std::ptrdiff_t>(decision.first_step);
  const std::size_t steps = std::max(decision.steps, decision.merge_steps);
  return {first, first + static_cast<std::ptrdiff_t>(steps)};
}

/// The plan that was opened when the waiting began; nothing if there is none, or none any more.
std::optional<wire::PlanReply> AgentCore::take_chain_locked(MergeWait& wait) {
  std::optional<wire::PlanReply> chain = std::exchange(wait.chain, std::nullopt);
  if (chain && plans_.count(chain->plan) == 0) chain.reset();
  return chain;
}

/// A plan waits for one merge. If its target is superseded meanwhile, the plan goes on from there by the ring's steps.
std::optional<std::vector<RingEntryPtr>> AgentCore::merged_steps_locked(const Decision& decision, MergeWait& wait) {
  wait.hit = false;
  std::vector<RingEntryPtr> chain = ring_steps_locked(decision);
  const std::size_t steps = chain.size();
  if (decision.merge_steps == 0 || options_.merge_steps_min == 0 || steps < options_.merge_steps_min) return chain;
  const MergeKey key = key_of(chain, steps);
  if (wait.may_wait && !wait.key) {
    const MergeCache::State state = merges_.state(key);
    wait.began = state == MergeCache::State::none && merges_.want(key);
    if (wait.began) merge_cv_.notify_one();
    if (wait.began || state == MergeCache::State::wanted) wait.key = key;
  }
  if (wait.may_wait && wait.key && merges_.state(*wait.key) == MergeCache::State::wanted) return std::nullopt;
  wait.hit = replace_merged_locked(chain) != 0 && !wait.began;
  return chain;
}

/// Puts the longest merged delta in place of the steps that it stands for, and returns their number; 0: there is none.
std::size_t AgentCore::replace_merged_locked(std::vector<RingEntryPtr>& chain) const {
  for (std::size_t steps = chain.size(); steps >= 2; --steps) {
    RingEntryPtr merged = merges_.find(key_of(chain, steps));
    if (!merged) continue;
    chain.erase(chain.begin() + 1, chain.begin() + static_cast<std::ptrdiff_t>(steps));
    chain.front() = std::move(merged);
    return steps;
  }
  return 0;
}

/// The ring's steps from one end to the other; none if it has left the ring.
std::vector<RingEntryPtr> AgentCore::chain_locked(const MergeKey& key) const {
  std::vector<RingEntryPtr> chain;
  for (const RingEntryPtr& entry : ring_.entries()) {
    const delta::Delta& d = *entry->delta;
    if (chain.empty() && (d.from != key.from || d.from_root != key.from_root)) continue;
    chain.push_back(entry);
    if (d.to == key.to) return chain;
  }
  return {};
}

/// After each change of the ring.
void AgentCore::retain_merges_locked() {
  merges_.set_bytes_max(options_.merge_bytes_max != 0 ? options_.merge_bytes_max : ring_.bytes_max());
  let_go_locked(merges_.retain(ring_.entries()));
  if (merging_ && merges_.state(*merging_) != MergeCache::State::wanted) merge_cancel_ = true;
}

/// Plans may still hold them, as they hold what leaves the ring.
void AgentCore::let_go_locked(std::vector<RingEntryPtr> entries) {
  for (RingEntryPtr& entry : entries) {
    evicted_.push_back(entry);
    yard_->bury(std::move(entry));
  }
}

AgentCore::MergeInfo AgentCore::merges() const {
  const std::lock_guard lock(mutex_);
  MergeInfo info;
  for (const RingEntryPtr& entry : merges_.entries()) {
    const delta::Delta& d = *entry->delta;
    info.entries.push_back({entry->from, entry->to, d.frame_bytes, d.changed, entry->encode_s, entry->made_at});
  }
  info.bytes = merges_.bytes();
  info.bytes_max = merges_.bytes_max();
  info.wanted = merges_.wanted();
  return info;
}

// ---- the merging thread ------------------------------------------------------------------------------------------

void AgentCore::merge_loop(ThreadPool& pool) {
  for (;;) {
    MergeKey key;
    {
      std::unique_lock lock(mutex_);
      merge_cv_.wait(lock, [this] { return stop_ || merges_.wanted() != 0; });
      if (stop_) return;
      key = *merges_.next();
      merging_ = key;
      merge_cancel_ = false;
    }
    try {
      merge_one(key, pool);
    } catch (const std::exception& e) {  // memory: it may be tried again
      spdlog::warn("merge_failed to={} error=\"{}\"", to_string(key.to), e.what());
      const std::lock_guard lock(mutex_);
      merges_.forget(key);
    }
    {
      const std::lock_guard lock(mutex_);
      merging_.reset();
    }
    notify();
  }
}

void AgentCore::merge_one(const MergeKey& key, ThreadPool& pool) {
  if (options_.before_merge) options_.before_merge();
  LayoutPtr layout;
  std::vector<RingEntryPtr> chain;
  std::uint64_t chain_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    chain = chain_locked(key);
    if (chain.empty()) {
      merges_.forget(key);
      return;
    }
    for (const RingEntryPtr& entry : chain) chain_bytes += entry->delta->frame_bytes;
    replace_merged_locked(chain);
    layout = snapshot_->generation->layout;
  }
  RingEntryPtr made = merge_chain(key, *layout, chain, chain_bytes, pool);
  const std::lock_guard lock(mutex_);
  for (RingEntryPtr& entry : chain) yard_->bury(std::move(entry));  // it may have left the ring meanwhile
  if (made) {
    let_go_locked(merges_.put(key, std::move(made)));
    trim_pinned_locked();
  } else {
    merges_.fail(key);
  }
}

/// Null if it cannot be merged or is not worth it; `bytes_before` are those of the ring's steps.
RingEntryPtr AgentCore::merge_chain(const MergeKey& key, const Layout& layout, const std::vector<RingEntryPtr>& chain,
                                    std::uint64_t bytes_before, ThreadPool& pool) {
  const auto start = Clock::now();
  trace::Span span("merge", key.to, {{"steps", chain.size()}});
  std::vector<const delta::Delta*> deltas;
  deltas.reserve(chain.size());
  for (const RingEntryPtr& entry : chain) deltas.push_back(entry->delta.get());
  delta::MergeOptions options;
  options.cancel = &merge_cancel_;
  options.read_target = [&](auto tiles, std::byte* out) { return read_served(key.to, tiles, out); };
  auto merged = delta::merge(layout, deltas, options, pool);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const std::uint64_t bytes_max = std::min(bytes_before, layout.half_bytes() - 1);
  if (!merged || !*merged || (*merged)->frame_bytes > bytes_max) {
    if (merged || merged.error().code() != Errc::cancelled) Metrics::add(metrics_.merges_failed, 1);
    const std::string why = !merged    ? merged.error().to_string()
                            : !*merged ? "some tiles cannot be told without the version that it leads to"
                                       : "it is larger than the chain or a half";
    spdlog::info("deltas_not_merged from={} to={} reason=\"{}\"", to_string(key.from), to_string(key.to), why);
    return nullptr;
  }
  const delta::Delta& d = **merged;
  span.set({"bytes", d.frame_bytes});
  Metrics::add(metrics_.merges, 1);
  Metrics::add(metrics_.merge_bytes, d.frame_bytes);
  Metrics::add(metrics_.merge_us, static_cast<std::uint64_t>(seconds * 1e6));
  spdlog::info("deltas_merged from={} to={} pieces={} bytes={} chain_bytes={} merge_s={:.4f}", to_string(key.from),
               to_string(key.to), chain.size(), d.frame_bytes, bytes_before, seconds);
  return RingEntry::make(std::move(**merged), chain.front()->from, chain.back()->to, seconds);
}

/// From the half, if it still is what is served: a lease for the time of the copy only, so that no writer waits for a
/// merge.
bool AgentCore::read_served(const VersionId& version, std::span<const std::uint64_t> tiles, std::byte* out) {
  ServedPtr served;
  LeasePtr lease;
  {
    const std::lock_guard lock(mutex_);
    served = snapshot_->served;
    if (!served || served->version.id != version) return false;
    lease = leases_.begin(served->half);
  }
  {
    const auto reader = leases_.enter(lease, [] {});
    const Generation& generation = *served->generation;
    for (const std::uint64_t tile : tiles) {
      if (!reader || !reader->may_send()) break;
      out = delta::copy_tile(*generation.layout, generation.segment->half(served->half.half), tile, out);
    }
  }
  const bool whole = lease->live();
  leases_.end(*lease);
  return whole;
}

}  // namespace deltasync::agent
