// Deltas that are made when a receiver asks: merged ones for those that are several versions late, compact ones for
// slow links. Which plans wait for one, and the threads that make them.
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

DeltaKey key_of(const std::vector<RingEntryPtr>& chain, std::size_t steps, DeltaForm form) {
  const delta::Delta& first = *chain.front()->delta;
  return {first.from, first.from_root, chain[steps - 1]->delta->to, form};
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What was in the way may be gone the next time.
bool passes(const Error& error) {
  return error.code() == Errc::no_space || error.code() == Errc::cancelled;
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
std::optional<wire::PlanReply> AgentCore::take_chain_locked(PendingPlan& pending) {
  std::optional<wire::PlanReply> chain = std::exchange(pending.chain, std::nullopt);
  if (chain && plans_.count(chain->plan) == 0) chain.reset();
  return chain;
}

/// The deltas that would be better answers than the chain, the best first.
std::vector<DeltaKey> AgentCore::better_than(const Decision& decision, const std::vector<RingEntryPtr>& chain) const {
  std::vector<DeltaKey> better;
  if (decision.merge_steps == 0 || options_.merge_steps_min == 0) return better;
  const std::size_t steps = chain.size();
  const bool merges = steps >= std::max<std::size_t>(2, options_.merge_steps_min);
  if (decision.compact && (merges || steps == 1)) better.push_back(key_of(chain, steps, DeltaForm::compact));
  if (merges) better.push_back(key_of(chain, steps, DeltaForm::plain));
  return better;
}

/// Asks for the best one that can be had, unless that is there.
void AgentCore::request_better_locked(const std::vector<DeltaKey>& better, PendingPlan& pending) {
  for (const DeltaKey& key : better) {
    const DerivedDeltaCache::State before = derived_.state(key);
    if (before == DerivedDeltaCache::State::made) return;
    pending.request = derived_.request(key);
    if (!pending.request) continue;  // impossible, or too many are wanted
    pending.key = key;
    pending.began = before == DerivedDeltaCache::State::none;
    if (pending.began) build_cv_.notify_all();
    return;
  }
}

/// A plan waits for one delta to be made. If its target is superseded meanwhile, the plan goes on from there by the
/// ring's steps.
std::optional<std::vector<RingEntryPtr>> AgentCore::derived_steps_locked(const Decision& decision,
                                                                         PendingPlan& pending) {
  pending.hit = false;
  std::vector<RingEntryPtr> chain = ring_steps_locked(decision);
  const std::vector<DeltaKey> better = better_than(decision, chain);
  if (better.empty()) return chain;
  if (pending.may_wait && !pending.key) request_better_locked(better, pending);
  if (pending.may_wait && pending.key && derived_.state(*pending.key) == DerivedDeltaCache::State::wanted)
    return std::nullopt;
  pending.request.reset();
  pending.hit = put_derived_locked(chain, decision.compact) && !pending.began;
  return chain;
}

/// Puts the delta that stands for most of the steps, and is compact if it may be, in their place; false: there is none.
bool AgentCore::put_derived_locked(std::vector<RingEntryPtr>& chain, bool compact) const {
  for (std::size_t steps = chain.size(); steps >= 1; --steps) {
    RingEntryPtr made;
    if (compact) made = derived_.find(key_of(chain, steps, DeltaForm::compact));
    if (!made && steps >= 2) made = derived_.find(key_of(chain, steps, DeltaForm::plain));
    if (!made) continue;
    chain.erase(chain.begin() + 1, chain.begin() + static_cast<std::ptrdiff_t>(steps));
    chain.front() = std::move(made);
    return true;
  }
  return false;
}

/// The ring's steps from one end to the other; none if it has left the ring.
std::vector<RingEntryPtr> AgentCore::chain_locked(const DeltaKey& key) const {
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
void AgentCore::retain_derived_locked() {
  derived_.set_bytes_max(options_.merge_bytes_max != 0 ? options_.merge_bytes_max : ring_.bytes_max());
  release_entries_locked(derived_.retain(ring_.entries()));
  for (DeltaBuilder* builder : {&merger_, &compacter_}) {
    if (builder->key && derived_.state(*builder->key) != DerivedDeltaCache::State::wanted) builder->cancel = true;
  }
  build_cv_.notify_all();
}

/// Plans may still hold them, as they hold what leaves the ring.
void AgentCore::release_entries_locked(std::vector<RingEntryPtr> entries) {
  for (RingEntryPtr& entry : entries) {
    evicted_.push_back(entry);
    reclaimer_->retire(std::move(entry));
  }
}

AgentCore::DerivedInfo AgentCore::derived() const {
  const std::lock_guard lock(mutex_);
  DerivedInfo info;
  for (const RingEntryPtr& entry : derived_.entries()) {
    const delta::Delta& d = *entry->delta;
    const bool compact = d.stats[static_cast<unsigned>(delta::Codec::rice_class)].tiles != 0;
    info.entries.push_back(
        {entry->from, entry->to, d.frame_bytes, d.changed, compact, entry->encode_s, entry->made_at});
  }
  info.bytes = derived_.bytes();
  info.bytes_max = derived_.bytes_max();
  info.wanted = derived_.wanted();
  return info;
}

// ---- the builders' threads -----------------------------------------------------------------------------------------

/// What one of them is at.
struct AgentCore::Build {
  DeltaKey key;
  LayoutPtr layout;
  std::vector<RingEntryPtr> chain;  ///< the ring's steps, the first of them perhaps merged already
  std::uint64_t chain_bytes = 0;    ///< of the ring's steps
  delta::MergeOptions options;
  ThreadPool& pool;
};

void AgentCore::start_builder(DeltaBuilder& builder, const std::string& name) {
  builder.thread = start_background(name, std::max(1u, options_.threads / 2),
                                    [this, &builder](ThreadPool& pool) { build_loop(builder, pool); });
}

void AgentCore::build_loop(DeltaBuilder& builder, ThreadPool& pool) {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      build_cv_.wait(lock, [&] { return stop_ || (builder.key = derived_.begin(builder.form)).has_value(); });
      if (stop_) return;
      builder.cancel = false;
    }
    const DeltaKey key = *builder.key;
    try {
      build_one(builder, key, pool);
    } catch (const std::exception& e) {  // memory: it may be tried again
      log::warn("merge_failed to={} error=\"{}\"", to_string(key.to), e.what());
      const std::lock_guard lock(mutex_);
      derived_.forget(key);
    }
    {
      const std::lock_guard lock(mutex_);
      builder.key.reset();
    }
    build_cv_.notify_all();
    notify();
  }
}

void AgentCore::build_one(DeltaBuilder& builder, const DeltaKey& key, ThreadPool& pool) {
  if (options_.before_merge) options_.before_merge();
  Build build{key, nullptr, {}, 0, {}, pool};
  build.options.cancel = &builder.cancel;
  build.options.read_target = [this, to = key.to](auto tiles, std::byte* out) { return read_served(to, tiles, out); };
  {
    const std::lock_guard lock(mutex_);
    build.chain = chain_locked(key);
    if (build.chain.empty()) return derived_.forget(key);
    for (const RingEntryPtr& entry : build.chain) build.chain_bytes += entry->delta->frame_bytes;
    put_derived_locked(build.chain, false);
    build.layout = snapshot_->generation->layout;
  }
  Result<RingEntryPtr> made = key.form == DeltaForm::plain ? merge_chain(build) : compact_chain(build);
  const std::lock_guard lock(mutex_);
  for (RingEntryPtr& entry : build.chain) reclaimer_->retire(std::move(entry));  // it may have left the ring meanwhile
  if (!made) return derived_.forget(key);
  if (!*made) return derived_.fail(key);
  release_entries_locked(derived_.put(key, std::move(*made)));
  trim_pinned_locked();
}

Result<RingEntryPtr> AgentCore::merge_chain(const Build& build) {
  const auto start = Clock::now();
  const DeltaKey& key = build.key;
  trace::Span span("merge", key.to, {{"steps", build.chain.size()}});
  std::vector<const delta::Delta*> deltas;
  deltas.reserve(build.chain.size());
  for (const RingEntryPtr& entry : build.chain) deltas.push_back(entry->delta.get());
  auto merged = delta::merge(*build.layout, deltas, build.options, build.pool);
  const double seconds = seconds_since(start);
  const std::uint64_t bytes_max = std::min(build.chain_bytes, build.layout->half_bytes() - 1);
  if (!merged || !*merged || (*merged)->frame_bytes > bytes_max) {
    if (merged || merged.error().code() != Errc::cancelled) Metrics::add(metrics_.merges_failed, 1);
    const std::string why = !merged    ? merged.error().to_string()
                            : !*merged ? "some tiles cannot be told without the version that it leads to"
                                       : "it is larger than the chain or a half";
    log::info("deltas_not_merged from={} to={} reason=\"{}\"", to_string(key.from), to_string(key.to), why);
    if (!merged && passes(merged.error())) return std::move(merged).error();
    return RingEntryPtr();
  }
  const delta::Delta& d = **merged;
  span.set({"bytes", d.frame_bytes});
  Metrics::add(metrics_.merges, 1);
  Metrics::add(metrics_.merge_bytes, d.frame_bytes);
  Metrics::add(metrics_.merge_seconds, seconds);
  log::info("deltas_merged from={} to={} pieces={} bytes={} chain_bytes={} merge_s={:.4f}", to_string(key.from),
            to_string(key.to), build.chain.size(), d.frame_bytes, build.chain_bytes, seconds);
  return RingEntryPtr(RingEntry::make(std::move(**merged), build.chain.front()->from, build.chain.back()->to, seconds));
}

Result<RingEntryPtr> AgentCore::compact_chain(const Build& build) {
  if (build.chain.size() == 1) return compact_one(build, *build.chain.front());
  DS_ASSIGN(const RingEntryPtr merged, merged_for(build));
  if (!merged) return RingEntryPtr();
  return compact_one(build, *merged);
}

/// The one delta for a chain that a compact one is made of. It comes from the merger like any other, so that no chain
/// is merged twice, and is kept: whose wait ends meanwhile takes that. Null: there is none.
Result<RingEntryPtr> AgentCore::merged_for(const Build& build) {
  DeltaKey key = build.key;
  key.form = DeltaForm::plain;
  std::unique_lock lock(mutex_);
  const DerivedDeltaCache::Request request = derived_.request(key);
  if (request) {
    build_cv_.notify_all();
    build_cv_.wait(lock,
                   [&] { return *build.options.cancel || derived_.state(key) != DerivedDeltaCache::State::wanted; });
  }
  RingEntryPtr merged = derived_.find(key);
  if (merged || derived_.state(key) == DerivedDeltaCache::State::impossible) return merged;
  return Error(Errc::cancelled, "its merged form was not made");
}

Result<RingEntryPtr> AgentCore::compact_one(const Build& build, const RingEntry& plain) {
  const auto start = Clock::now();
  const DeltaKey& key = build.key;
  const delta::Delta& before = *plain.delta;
  trace::Span span("compact", key.to);
  auto made = delta::compact_from_target(*build.layout, before, build.options, build.pool);
  const double seconds = seconds_since(start);
  if (!made || !*made || (*made)->frame_bytes >= before.frame_bytes) {
    if (made || made.error().code() != Errc::cancelled) Metrics::add(metrics_.compacts_failed, 1);
    const std::string why = !made    ? made.error().to_string()
                            : !*made ? "the version that it leads to is not served any more"
                                     : "no tile is smaller in exponent classes";
    log::info("delta_not_compacted from={} to={} reason=\"{}\"", to_string(key.from), to_string(key.to), why);
    if (!made && passes(made.error())) return std::move(made).error();
    return RingEntryPtr();
  }
  const delta::Delta& d = **made;
  span.set({"bytes", d.frame_bytes});
  Metrics::add(metrics_.compacts, 1);
  Metrics::add(metrics_.compact_bytes, d.frame_bytes);
  Metrics::add(metrics_.compact_seconds, seconds);
  log::info("delta_compacted from={} to={} bytes={} plain_bytes={} compact_s={:.4f}", to_string(key.from),
            to_string(key.to), d.frame_bytes, before.frame_bytes, seconds);
  return RingEntryPtr(RingEntry::make(std::move(**made), plain.from, plain.to, seconds));
}

/// From the half, if it still is what is served. No lease: no writer waits for a thread of low priority.
bool AgentCore::read_served(const VersionId& version, std::span<const std::uint64_t> tiles, std::byte* out) const {
  ServedPtr served = snapshot()->served;
  const bool read = served && served->version.id == version && copy_while_served(*served, tiles, out);
  reclaimer_->retire(std::move(served));  // it may be the last to hold a generation
  return read;
}

}  // namespace deltasync::agent
