#include "agent/derive/delta_builder.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "agent/background.hpp"
#include "base/log.hpp"

namespace deltasync::agent {
namespace {

DeltaKey chain_key(const std::vector<RingEntryPtr>& steps, std::size_t count, DeltaForm form, std::uint64_t revision) {
  const delta::Delta& first = *steps.front()->delta;
  return {first.from, first.from_root, steps[count - 1]->delta->to, form, revision};
}

/// The ring's steps from one end to the other; none if they have left the ring.
std::vector<RingEntryPtr> find_chain(const Snapshot& now, const DeltaKey& key) {
  std::vector<RingEntryPtr> chain;
  if (now.ring_revision != key.revision) return chain;
  for (const RingEntryPtr& entry : now.ring) {
    const delta::Delta& d = *entry->delta;
    if (chain.empty() && (d.from != key.from || d.from_root != key.from_root)) continue;
    chain.push_back(entry);
    if (d.to == key.to) return chain;
  }
  return {};
}

}  // namespace

DeltaBuilder::DeltaBuilder(const CoreOptions& options, VersionStore& versions, std::shared_ptr<Reclaimer> reclaimer,
                           Metrics& metrics)
    : options_(options),
      versions_(versions),
      reclaimer_(std::move(reclaimer)),
      metrics_(metrics),
      cache_(options.merge_bytes_max),
      listener_(versions.changes().listen([this] { retain(); })) {}

void DeltaBuilder::start() {
  start(merger_, "merge");
  start(compacter_, "compact");
}

void DeltaBuilder::start(Worker& worker, const std::string& name) {
  worker.thread = start_background(name, std::max(1u, options_.threads / 2),
                                   [this, &worker](ThreadPool& pool) { work(worker, pool); });
}

void DeltaBuilder::ask_to_stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    merger_.cancel = compacter_.cancel = true;
  }
  changed_.notify_all();
}

void DeltaBuilder::stop() {
  ask_to_stop();
  for (Worker* worker : {&merger_, &compacter_}) {
    if (worker->thread.joinable()) worker->thread.join();
  }
}

// ---- for plans ---------------------------------------------------------------------------------------------------

/// A plan waits for one delta to be made. If its target is superseded meanwhile, the plan goes on from there by the
/// ring's steps.
std::optional<std::vector<RingEntryPtr>> DeltaBuilder::steps(Chain chain, DerivedWait& wait) {
  const std::vector<DeltaKey> better = better_than(chain);
  if (better.empty()) return std::move(chain.steps);
  const std::lock_guard lock(mutex_);
  if (wait.may_wait && !wait.key) request_locked(better, wait);
  if (wait.may_wait && wait.key && cache_.state(*wait.key) == DerivedDeltaCache::State::wanted) return std::nullopt;
  wait.request.reset();
  wait.hit = put_derived_locked(chain, chain.compact) && !wait.began;
  return std::move(chain.steps);
}

/// The deltas that would be better answers than the chain, the best first.
std::vector<DeltaKey> DeltaBuilder::better_than(const Chain& chain) const {
  std::vector<DeltaKey> better;
  if (!chain.derivable || options_.merge_steps_min == 0) return better;
  const std::size_t steps = chain.steps.size();
  const bool merges = steps >= std::max<std::size_t>(2, options_.merge_steps_min);
  if (chain.compact && (merges || steps == 1)) {
    better.push_back(chain_key(chain.steps, steps, DeltaForm::compact, chain.revision));
  }
  if (merges) better.push_back(chain_key(chain.steps, steps, DeltaForm::plain, chain.revision));
  return better;
}

/// Asks for the best one that can be had, unless that is there.
void DeltaBuilder::request_locked(const std::vector<DeltaKey>& better, DerivedWait& wait) {
  for (const DeltaKey& key : better) {
    const DerivedDeltaCache::State before = cache_.state(key);
    if (before == DerivedDeltaCache::State::made) return;
    wait.request = cache_.request(key);
    if (!wait.request) continue;  // impossible, or too many are wanted
    wait.key = key;
    wait.began = before == DerivedDeltaCache::State::none;
    if (wait.began) changed_.notify_all();
    return;
  }
}

/// Puts the delta that stands for most of the steps, and is compact if it may be, in their place; false: there is none.
bool DeltaBuilder::put_derived_locked(Chain& chain, bool compact) const {
  for (std::size_t steps = chain.steps.size(); steps >= 1; --steps) {
    RingEntryPtr made;
    if (compact) made = cache_.find(chain_key(chain.steps, steps, DeltaForm::compact, chain.revision));
    if (!made && steps >= 2) made = cache_.find(chain_key(chain.steps, steps, DeltaForm::plain, chain.revision));
    if (!made) continue;
    chain.steps.erase(chain.steps.begin() + 1, chain.steps.begin() + static_cast<std::ptrdiff_t>(steps));
    chain.steps.front() = std::move(made);
    return true;
  }
  return false;
}

/// After each change of the ring: drops what nobody can ask for any more.
void DeltaBuilder::retain() {
  const RetiredAtEnd<const Snapshot> now(*reclaimer_, versions_.snapshot());
  const std::lock_guard lock(mutex_);
  const SnapshotPtr& share = now.share();
  if (!retained_.owner_before(share) && !share.owner_before(retained_)) return;  // another kind of change
  cache_.set_bytes_max(options_.merge_bytes_max != 0 ? options_.merge_bytes_max : now->ring_bytes_max);
  for (RingEntryPtr& entry : cache_.retain(now->ring, now->ring_revision)) reclaimer_->retire(std::move(entry));
  retained_ = share;
  for (Worker* worker : {&merger_, &compacter_}) {
    if (worker->key && cache_.state(*worker->key) != DerivedDeltaCache::State::wanted) worker->cancel = true;
  }
  changed_.notify_all();
}

std::vector<RingEntryPtr> DeltaBuilder::kept() const {
  const std::lock_guard lock(mutex_);
  return cache_.entries();
}

DeltaBuilder::Info DeltaBuilder::info() const {
  const std::lock_guard lock(mutex_);
  Info info;
  for (const RingEntryPtr& entry : cache_.entries()) {
    const delta::Delta& d = *entry->delta;
    const bool compact = d.stats[static_cast<unsigned>(delta::Codec::rice_class)].tiles != 0;
    info.entries.push_back(
        {entry->from, entry->to, d.frame_bytes, d.changed, compact, entry->encode_s, entry->made_at});
  }
  info.bytes = cache_.bytes();
  info.bytes_max = cache_.bytes_max();
  info.wanted = cache_.wanted();
  return info;
}

// ---- the workers' threads ----------------------------------------------------------------------------------------

void DeltaBuilder::work(Worker& worker, ThreadPool& pool) {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || (worker.key = cache_.begin(worker.form)).has_value(); });
      if (stop_) return;
      worker.cancel = false;
    }
    const DeltaKey key = *worker.key;
    try {
      build(worker, key, pool);
    } catch (const std::exception& e) {  // memory: it may be tried again
      log::warn("merge_failed version={} error=\"{}\"", key.to.number, e.what());
      const std::lock_guard lock(mutex_);
      cache_.forget(key);
    }
    changed_.notify_all();
    versions_.changes().notify();
  }
}

void DeltaBuilder::build(Worker& worker, const DeltaKey& key, ThreadPool& pool) {
  if (options_.before_merge) options_.before_merge();
  DeltaBuild build{key, nullptr, {}, 0, {}, pool, metrics_};
  build.options.cancel = &worker.cancel;
  build.options.read_target = [this, to = key.to](auto tiles, std::byte* out) { return read_served(to, tiles, out); };
  {
    const RetiredAtEnd<const Snapshot> now(*reclaimer_, versions_.snapshot());
    Chain chain{find_chain(*now, key), key.revision, true, false};
    const std::lock_guard lock(mutex_);
    if (chain.steps.empty()) return cache_.forget(key);
    for (const RingEntryPtr& entry : chain.steps) build.chain_bytes += entry->delta->frame_bytes;
    put_derived_locked(chain, false);
    build.chain = std::move(chain.steps);
    build.layout = now->generation->layout;
  }
  Result<RingEntryPtr> made = make(build);
  const std::lock_guard lock(mutex_);
  for (RingEntryPtr& entry : build.chain) reclaimer_->retire(std::move(entry));  // it may have left the ring meanwhile
  if (!made) return cache_.forget(key);
  if (!*made) return cache_.fail(key);
  for (RingEntryPtr& old : cache_.put(key, std::move(*made))) reclaimer_->retire(std::move(old));
}

Result<RingEntryPtr> DeltaBuilder::make(const DeltaBuild& build) {
  if (build.key.form == DeltaForm::plain) return merge_chain(build);
  if (build.chain.size() == 1) return compact_delta(build, *build.chain.front());
  DS_ASSIGN(const RingEntryPtr merged, merged_for(build));
  if (!merged) return RingEntryPtr();
  return compact_delta(build, *merged);
}

/// The one delta for a chain that a compact one is made of. It comes from the merger like any other, so that no chain
/// is merged twice, and is kept: whose wait ends meanwhile takes that. Null: there is none.
Result<RingEntryPtr> DeltaBuilder::merged_for(const DeltaBuild& build) {
  DeltaKey key = build.key;
  key.form = DeltaForm::plain;
  std::unique_lock lock(mutex_);
  const DerivedDeltaCache::Request request = cache_.request(key);
  if (request) {
    changed_.notify_all();
    changed_.wait(lock, [&] { return *build.options.cancel || cache_.state(key) != DerivedDeltaCache::State::wanted; });
  }
  RingEntryPtr merged = cache_.find(key);
  if (merged || cache_.state(key) == DerivedDeltaCache::State::impossible) return merged;
  return Error(Errc::cancelled, "its merged form was not made");
}

/// From the half, if it still is what is served. No lease: no writer waits for a thread of low priority.
bool DeltaBuilder::read_served(const VersionId& version, std::span<const std::uint64_t> tiles, std::byte* out) const {
  const RetiredAtEnd<const Snapshot> now(*reclaimer_, versions_.snapshot());  // it may be the last to hold a generation
  const ServedPtr& served = now->served;
  return served && served->version.id == version && copy_while_served(*served, tiles, out);
}

}  // namespace deltasync::agent
