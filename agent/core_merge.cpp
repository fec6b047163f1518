// Deltas that are made when a receiver asks: merged ones for those that are several versions late, compact ones for
// slow links. Which plans wait for one, and the thread that makes them.
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

MergeKey key_of(const std::vector<RingEntryPtr>& chain, std::size_t steps, DeltaForm form) {
  const delta::Delta& first = *chain.front()->delta;
  return {first.from, first.from_root, chain[steps - 1]->delta->to, form};
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
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

/// The one delta that would be the best answer in place of the chain; nothing if none may be made.
std::optional<MergeKey> AgentCore::best_locked(const Decision& decision, const std::vector<RingEntryPtr>& chain) const {
  if (decision.merge_steps == 0 || options_.merge_steps_min == 0) return std::nullopt;
  const std::size_t steps = chain.size();
  const bool merges = steps >= std::max<std::size_t>(2, options_.merge_steps_min);
  if (decision.compact && (merges || steps == 1)) {
    const MergeKey compact = key_of(chain, steps, DeltaForm::compact);
    if (merges_.state(compact) != MergeCache::State::impossible) return compact;
  }
  if (!merges) return std::nullopt;
  return key_of(chain, steps, DeltaForm::plain);
}

/// A plan waits for one delta to be made. If its target is superseded meanwhile, the plan goes on from there by the
/// ring's steps.
std::optional<std::vector<RingEntryPtr>> AgentCore::merged_steps_locked(const Decision& decision, MergeWait& wait) {
  wait.hit = false;
  std::vector<RingEntryPtr> chain = ring_steps_locked(decision);
  const std::optional<MergeKey> best = best_locked(decision, chain);
  if (!best) return chain;
  if (wait.may_wait && !wait.key) {
    const MergeCache::State state = merges_.state(*best);
    wait.began = state == MergeCache::State::none && merges_.want(*best);
    if (wait.began) merge_cv_.notify_one();
    if (wait.began || state == MergeCache::State::wanted) wait.key = best;
  }
  if (wait.may_wait && wait.key && merges_.state(*wait.key) == MergeCache::State::wanted) return std::nullopt;
  wait.hit = replace_made_locked(chain, decision.compact) && !wait.began;
  return chain;
}

/// Puts the delta that stands for most of the steps, and is compact if it may be, in their place; false: there is none.
bool AgentCore::replace_made_locked(std::vector<RingEntryPtr>& chain, bool compact) const {
  for (std::size_t steps = chain.size(); steps >= 1; --steps) {
    RingEntryPtr made;
    if (compact) made = merges_.find(key_of(chain, steps, DeltaForm::compact));
    if (!made && steps >= 2) made = merges_.find(key_of(chain, steps, DeltaForm::plain));
    if (!made) continue;
    chain.erase(chain.begin() + 1, chain.begin() + static_cast<std::ptrdiff_t>(steps));
    chain.front() = std::move(made);
    return true;
  }
  return false;
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
    const bool compact = d.stats[static_cast<unsigned>(delta::Codec::rice_class)].tiles != 0;
    info.entries.push_back(
        {entry->from, entry->to, d.frame_bytes, d.changed, compact, entry->encode_s, entry->made_at});
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
    replace_made_locked(chain, false);
    layout = snapshot_->generation->layout;
  }
  RingEntryPtr made = key.form == DeltaForm::plain ? merge_chain(key, *layout, chain, chain_bytes, pool)
                                                   : compact_chain(key, *layout, chain, chain_bytes, pool);
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
  auto merged = delta::merge(layout, deltas, make_options(key), pool);
  const double seconds = seconds_since(start);
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

delta::MergeOptions AgentCore::make_options(const MergeKey& key) {
  delta::MergeOptions options;
  options.cancel = &merge_cancel_;
  options.read_target = [this, to = key.to](auto tiles, std::byte* out) { return read_served(to, tiles, out); };
  return options;
}

/// Null as for merge_chain(). A merged delta that has to be made on the way is kept as well: whose wait ends meanwhile
/// takes that.
RingEntryPtr AgentCore::compact_chain(const MergeKey& key, const Layout& layout, const std::vector<RingEntryPtr>& chain,
                                      std::uint64_t bytes_before, ThreadPool& pool) {
  if (chain.size() == 1) return compact_one(key, layout, *chain.front(), pool);
  MergeKey merged_key = key;
  merged_key.form = DeltaForm::plain;
  const RingEntryPtr merged = merge_chain(merged_key, layout, chain, bytes_before, pool);
  if (!merged) return nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (merges_.state(key) == MergeCache::State::wanted) {  // else nobody can ask for either any more
      static_cast<void>(merges_.want(merged_key));          // somebody else may have wanted it before
      let_go_locked(merges_.put(merged_key, merged));
      trim_pinned_locked();
    }
  }
  notify();
  return compact_one(key, layout, *merged, pool);
}

RingEntryPtr AgentCore::compact_one(const MergeKey& key, const Layout& layout, const RingEntry& plain,
                                    ThreadPool& pool) {
  const auto start = Clock::now();
  const delta::Delta& before = *plain.delta;
  trace::Span span("compact", key.to);
  auto made = delta::compact_from_target(layout, before, make_options(key), pool);
  const double seconds = seconds_since(start);
  if (!made || !*made || (*made)->frame_bytes >= before.frame_bytes) {
    if (made || made.error().code() != Errc::cancelled) Metrics::add(metrics_.compacts_failed, 1);
    const std::string why = !made    ? made.error().to_string()
                            : !*made ? "the version that it leads to is not served any more"
                                     : "no tile is smaller in exponent classes";
    spdlog::info("delta_not_compacted from={} to={} reason=\"{}\"", to_string(key.from), to_string(key.to), why);
    return nullptr;
  }
  const delta::Delta& d = **made;
  span.set({"bytes", d.frame_bytes});
  Metrics::add(metrics_.compacts, 1);
  Metrics::add(metrics_.compact_bytes, d.frame_bytes);
  Metrics::add(metrics_.compact_us, static_cast<std::uint64_t>(seconds * 1e6));
  spdlog::info("delta_compacted from={} to={} bytes={} plain_bytes={} compact_s={:.4f}", to_string(key.from),
               to_string(key.to), d.frame_bytes, before.frame_bytes, seconds);
  return RingEntry::make(std::move(**made), plain.from, plain.to, seconds);
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
