#include "agent/core.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.hpp"
#include "base/racing_reads.hpp"
#include "delta/frame.hpp"
#include "net/auth.hpp"

namespace deltasync::agent {

bool copy_while_served(const ServedVersion& served, std::span<const std::uint64_t> tiles, std::byte* out) {
  const Generation& generation = *served.generation;
  const HalfKey& key = served.half;
  const auto there = [&] { return shm::still_holds(*generation.segment, key.half, key.sequence); };
  if (!there()) return false;
  {
    const RacingReads racing;
    for (const std::uint64_t tile : tiles) {
      out = delta::copy_tile(*generation.layout, generation.half(key.half), tile, out);
    }
  }
  return there();
}

AgentCore::AgentCore(const CoreOptions& options, shm::AgentLock lock)
    : options_(options),
      lock_(std::make_shared<shm::AgentLock>(std::move(lock))),
      leases_([this] { wake(); }),
      pool_(std::max(1u, options.threads), "encode"),
      overlapped_diff_(options.overlap_threads, metrics_.batches_overlapped, options.before_overlapped_diff),
      packers_(options.pack_threads),
      copy_room_(options.copy_bytes_max),
      peer_room_(options.peer_bytes_max),
      ring_(options.ring_bytes_max, options.ring_entries_max),
      derived_(options.merge_bytes_max),
      budgets_(options.lease_grace) {}

Result<std::unique_ptr<AgentCore>> AgentCore::start(const CoreOptions& options) {
  DS_TRY(shm::check_segment_name(options.name));
  DS_ASSIGN(auto lock, shm::AgentLock::acquire(options.shm_dir, options.name));
  std::unique_ptr<AgentCore> core(new AgentCore(options, std::move(lock)));
  DS_TRY(core->adopt_existing());
  core->reclaimer_thread_ = std::thread([reclaimer = core->reclaimer_] {
    set_thread_name("reclaimer");
    reclaimer->work();
  });
  core->keeper_.start();
  core->start_builder(core->merger_, "merge");
  core->start_builder(core->compacter_, "compact");
  core->publisher_ = std::thread([raw = core.get()] { raw->publish_loop(); });
  core->scrub_.emplace(options.scrub, core->scrub_source());
  return core;
}

AgentCore::~AgentCore() {
  stop();
}

void AgentCore::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    merger_.cancel = compacter_.cancel = true;
  }
  build_cv_.notify_all();
  wake();
  if (scrub_) scrub_->stop();
  packers_.stop();
  for (DeltaBuilder* builder : {&merger_, &compacter_}) {
    if (builder->thread.joinable()) builder->thread.join();
  }
  if (publisher_.joinable()) publisher_.join();
  keeper_.stop();
  reclaimer_->close();
  if (reclaimer_thread_.joinable()) reclaimer_thread_.join();
  const std::lock_guard lock(mutex_);
  while (!plans_.empty()) end_plan_locked(plans_.begin()->first);
  if (generations_.empty()) lock_->remove_on_release();  // there is nothing for a next agent of the name
}

/// Keeps the newest generation that holds a version, and a newer one that may still get its first.
Status AgentCore::adopt_existing() {
  DS_ASSIGN(const auto found, find_segments(options_.shm_dir, options_.name));
  std::vector<GenerationPtr> kept;
  bool has_version = false;
  for (const FoundSegment& segment : found) {
    generation_next_ = std::max(generation_next_, segment.number + 1);
    auto generation = has_version
                          ? Result<std::unique_ptr<Generation>>(Error(Errc::gone, "older than the one that is served"))
                          : Generation::adopt(segment.path, segment.number);
    if (!generation) {
      const Error& error = generation.error();
      // It may hold the last version: only what can never be read again is removed. Want of memory or descriptors
      // passes, and what belongs to somebody else is neither ours to remove nor safe to ignore.
      if (!has_version && error.code() != Errc::corrupt) {
        return std::move(generation)
            .error()
            .with_context("segment " + segment.path.name + ", which may hold the last version (remove it in " +
                          segment.path.dir.string() + " if it is not needed)");
      }
      log::warn("segment_removed name={} reason=\"{}\"", segment.path.name, error.to_string());
      DS_TRY(shm::Segment::unlink(segment.path));
      continue;
    }
    const shm::AgentRole& role = *(*generation)->role;
    has_version = role.active() || role.sealed();
    if (has_version) found_ = shm::inspect_newest(*(*generation)->segment).id;
    log::info("segment_adopted name={} layout={} has_version={}", segment.path.name,
              to_string((*generation)->layout->digest()), has_version);
    kept.insert(kept.begin(), reclaimer_->keep(std::move(generation).value()));
  }
  DS_TRY(sweep_stray_deltas());
  const std::lock_guard lock(mutex_);
  generations_ = std::move(kept);
  if (!generations_.empty()) {
    rebuild_snapshot_locked(generations_.front(), nullptr);
    wait_generation_ = generations_.back();
  }
  return {};
}

// ---- snapshots ---------------------------------------------------------------------------------------------------

std::uint64_t AgentCore::tiles_max() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t tiles = 0;
  for (const GenerationPtr& generation : generations_) tiles = std::max(tiles, generation->layout->tile_count());
  return tiles;
}

SnapshotPtr AgentCore::snapshot() const {
  const std::lock_guard lock(mutex_);
  return snapshot_;
}

void AgentCore::rebuild_snapshot_locked(GenerationPtr generation, ServedPtr served) {
  auto next = std::make_shared<Snapshot>();
  next->generation = std::move(generation);
  next->served = std::move(served);
  next->ring.assign(ring_.entries().begin(), ring_.entries().end());
  Offer& offer = next->offer;
  if (next->generation) {
    offer.has_layout = true;
    offer.layout = next->generation->layout->digest();
    offer.full_bytes = next->generation->layout->half_bytes();
  }
  if (next->served) {
    offer.has_version = true;
    offer.served = next->served->version;
    offer.served_root = next->served->root;
    for (const FormerState& state : next->served->former) offer.served_former_roots.push_back(state.root);
  }
  for (const RingEntryPtr& entry : next->ring) {
    const delta::Delta& d = *entry->delta;
    RingStep step{entry->from, entry->to, d.from_root, d.to_root, d.frames.size(), d.frame_bytes, d.changed, {}, false};
    for (const FormerState& state : entry->from_former) step.from_former_roots.push_back(state.root);
    step.partial = entry->partial;
    offer.ring.push_back(std::move(step));
  }
  if (next->served && next->generation->segment->in_place()) {  // else its files' names may be another agent's
    keeper_.keep(next->generation->segment->path(), next->ring, ring_.bytes_max());
  } else {
    keeper_.forget();
  }
  reclaimer_->retire(std::exchange(snapshot_, std::move(next)));  // it may be the last to hold deltas
  retain_derived_locked();
}

AgentCore::Listener AgentCore::listen(std::function<void()> changed) {
  const std::lock_guard lock(listeners_->mutex);
  const auto here = listeners_->list.insert(listeners_->list.end(), std::move(changed));
  return Listener(nullptr, [listeners = listeners_, here](void*) {
    const std::lock_guard end(listeners->mutex);
    listeners->list.erase(here);
  });
}

void AgentCore::notify() {
  const std::lock_guard lock(listeners_->mutex);
  for (const auto& changed : listeners_->list) changed();
}

void AgentCore::wake() {
  GenerationPtr generation;
  {
    const std::lock_guard lock(wake_mutex_);
    woken_ = true;
    generation = wait_generation_;
  }
  wake_cv_.notify_all();
  if (generation) generation->role->wake();
}

// ---- plans -------------------------------------------------------------------------------------------------------

Result<std::optional<wire::PlanReply>> AgentCore::plan(const wire::PlanRequest& plan, const Asker& asker,
                                                       std::string* waiting_for, PendingPlan& pending,
                                                       const SubsetPtr& subset) {
  if (plan.base.valid()) hear_of_epoch(plan.base.epoch);
  if (subset) return plan_subset(plan, asker, waiting_for, pending, subset);
  const std::lock_guard lock(mutex_);
  std::vector<RingEntryPtr> unknown;  // stays empty
  return plan_locked(plan, asker, waiting_for, pending, {nullptr, snapshot_->offer, unknown});
}

Result<std::optional<wire::PlanReply>> AgentCore::plan_locked(const wire::PlanRequest& plan, const Asker& asker,
                                                              std::string* waiting_for, PendingPlan& pending,
                                                              const Share& share) {
  if (stop_) return Error(Errc::connection, "the agent is shutting down");
  Decision decision = decide(plan, share.offer);
  if (decision.kind != Decision::Kind::delta) {
    // What it could have had before it waited for a merge may have left the ring meanwhile.
    if (auto chain = take_chain_locked(pending)) {
      count_pull(chain->mode);
      return std::optional<wire::PlanReply>(std::move(chain));
    }
  }
  switch (decision.kind) {
    case Decision::Kind::error: return Error(decision.code, decision.message);
    case Decision::Kind::wait: *waiting_for = decision.message; return std::optional<wire::PlanReply>();
    case Decision::Kind::up_to_date: {
      Metrics::add(metrics_.pulls_up_to_date, 1);
      wire::PlanReply reply;
      reply.mode = wire::PlanMode::up_to_date;
      reply.target = decision.target;
      reply.target_root = decision.target_root;
      return std::optional<wire::PlanReply>(std::move(reply));
    }
    default: break;
  }
  auto steps = derived_steps_locked(decision, pending);
  if (!steps) {
    if (decision.kind == Decision::Kind::delta && !pending.chain) {
      DS_ASSIGN(pending.chain, open_plan_locked(decision, ring_steps_locked(decision), asker, share));
    }
    *waiting_for = (pending.key->form == DeltaForm::compact ? "a compact delta of " : "the merge of ") +
                   std::to_string(decision.merge_steps) + " steps to " + to_string(decision.target);
    return std::optional<wire::PlanReply>();
  }
  if (!compute_subset_roots(share, *steps)) return std::optional<wire::PlanReply>();
  if (share.subset && decision.kind == Decision::Kind::delta) {
    // A merged delta is smaller than its chain for the whole model, which says little of a few tiles.
    std::uint64_t bytes = 0;
    for (const RingEntryPtr& entry : *steps) bytes += part_of(share, entry).frame_bytes;
    if (bytes >= share.offer.full_bytes) *steps = ring_steps_locked(decision);
  }
  if (pending.hit) Metrics::add(metrics_.merge_hits, 1);
  if (decision.kind == Decision::Kind::full && decision.merge_steps != 0) {
    // The chain itself is larger than a full transfer.
    std::uint64_t bytes = 0;
    for (const RingEntryPtr& entry : *steps) bytes += part_of(share, entry).frame_bytes;
    if (bytes < share.offer.full_bytes) {
      decision.kind = Decision::Kind::delta;
    } else {
      steps->clear();
    }
  }
  if (const auto chain = take_chain_locked(pending)) end_plan_locked(chain->plan);
  DS_ASSIGN(wire::PlanReply reply, open_plan_locked(decision, std::move(*steps), asker, share));
  count_pull(reply.mode);
  return std::optional<wire::PlanReply>(std::move(reply));
}

void AgentCore::count_pull(wire::PlanMode mode) {
  Metrics::add(mode == wire::PlanMode::full ? metrics_.pulls_full : metrics_.pulls_delta, 1);
}

Result<wire::PlanReply> AgentCore::open_plan_locked(const Decision& decision, std::vector<RingEntryPtr> steps,
                                                    const Asker& asker, const Share& share) {
  const auto open = std::count_if(plans_.begin(), plans_.end(),
                                  [&](const auto& entry) { return entry.second->connection == asker.connection; });
  if (static_cast<std::size_t>(open) >= options_.plans_per_connection_max) {
    return Error(Errc::invalid_argument,
                 "this connection holds " + std::to_string(open) + " plans already; release one before the next");
  }
  auto made = std::make_shared<OpenPlan>();
  do made->id = net::make_random_id();
  while (plans_.count(made->id) != 0);
  made->connection = asker.connection;
  made->layout = snapshot_->generation->layout;
  made->opened_at = std::chrono::steady_clock::now();
  made->expires_at = made->opened_at + options_.plan_limit;
  made->steps = std::move(steps);
  made->subset = share.subset;
  made->hold = holds_.begin({});
  const bool full = decision.kind == Decision::Kind::full;
  made->mode = full ? wire::PlanMode::full : wire::PlanMode::delta;
  if (full) {
    made->served = snapshot_->served;
    const LeaseBudgets::Time time = budgets_.of(asker.host);
    made->copied = time < options_.lease_grace && options_.copy_bytes_max != 0;
    made->lease =
        leases_.begin(made->served->half, {made->copied ? LeaseBudgets::Time(0) : time, asker.host, asker.name});
    made->packed_frames = packed_frames_.share(made->served->half, reclaimer_, peer_room_);
    Metrics::add(metrics_.leases, 1);
  }

  wire::PlanReply reply;
  reply.mode = made->mode;
  reply.plan = made->id;
  reply.target = decision.target;
  reply.target_root = decision.target_root;
  reply.full_bytes = share.offer.full_bytes;
  reply.pack_threads = full ? packers_.threads() : 0;
  std::size_t at = decision.first_step;
  for (const RingEntryPtr& entry : made->steps) {
    // A merged delta ends where one of the ring's does, whose root it is.
    while (share.offer.ring[at].to.id != entry->delta->to) ++at;
    const Subset::Part part = part_of(share, entry);
    reply.steps.push_back({entry->delta->from, entry->delta->to, share.offer.ring[at].to_root, part.frames,
                           part.frame_bytes, part.changed});
  }
  plans_.emplace(made->id, std::move(made));
  return reply;
}

Result<OpenPlanPtr> AgentCore::find_plan(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = plans_.find(id);
  if (found == plans_.end()) {
    return Error(Errc::lease_revoked, "this plan is over (released, expired, or its connection closed); plan again");
  }
  return found->second;
}

void AgentCore::release(std::uint64_t plan, std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  const auto found = plans_.find(plan);
  if (found == plans_.end() || found->second->connection != connection) return;
  const LeasePtr& lease = found->second->lease;
  if (lease && lease->live()) budgets_.gave_back(lease->terms().host);
  metrics_.pull.observe(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - found->second->opened_at).count());
  end_plan_locked(plan);
}

void AgentCore::connection_closed(std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> ended;
  for (const auto& [id, plan] : plans_) {
    if (plan->connection == connection) ended.push_back(id);
  }
  for (const std::uint64_t id : ended) end_plan_locked(id);
}

void AgentCore::end_plan_locked(std::uint64_t id) {
  const auto found = plans_.find(id);
  if (found == plans_.end()) return;
  if (found->second->lease) leases_.end(*found->second->lease);
  holds_.end(*found->second->hold);
  reclaimer_->retire(std::move(found->second));  // with deltas that have left the ring
  plans_.erase(found);
}

Result<LeaseTable::Reader> AgentCore::enter(const OpenPlan& plan, std::function<void()> wake) {
  return holds_.enter(plan.hold, std::move(wake));
}

/// Evicted deltas that plans still hold are memory beside the ring: at most once more the ring's own bound. Who sends
/// them lets go of them when the plan ends.
void AgentCore::trim_pinned_locked() {
  std::erase_if(evicted_, [](const auto& entry) { return entry.expired(); });
  // No shares are taken here, of an entry or of a plan: they might be the last.
  const std::set<std::weak_ptr<const RingEntry>, std::owner_less<>> evicted(evicted_.begin(), evicted_.end());
  for (;;) {
    std::set<const RingEntry*> pinned;
    std::uint64_t bytes = 0;
    const OpenPlan* oldest = nullptr;
    for (const auto& [id, plan] : plans_) {
      for (const RingEntryPtr& step : plan->steps) {
        if (evicted.count(step) == 0) continue;
        if (pinned.insert(step.get()).second) bytes += step->bytes();
        if (oldest == nullptr || plan->expires_at < oldest->expires_at) oldest = plan.get();
      }
    }
    if (oldest == nullptr || bytes <= ring_.bytes_max()) return;
    log::warn("plan_ended connection={} reason=\"holds {} bytes of deltas that left the ring\"", oldest->connection,
              bytes);
    Metrics::add(metrics_.plans_expired, 1);
    end_plan_locked(oldest->id);
  }
}

// ---- leases ------------------------------------------------------------------------------------------------------

std::chrono::milliseconds AgentCore::run_maintenance() {
  using Clock = std::chrono::steady_clock;
  const auto now = Clock::now();
  bool retiring_any = false;
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> expired;
  for (const auto& [id, plan] : plans_) {
    if (plan->expires_at <= now) expired.push_back(id);
  }
  for (const std::uint64_t id : expired) {
    Metrics::add(metrics_.plans_expired, 1);
    end_plan_locked(id);
  }

  std::optional<HalfRequest> request;
  for (const GenerationPtr& generation : generations_) {
    const auto retiring = generation->role->retiring();
    if (!retiring) continue;
    retiring_any = true;
    const auto waiting = generation->role->writer_waiting();
    if (!waiting) continue;
    const HalfKey key{generation->number, retiring->half, retiring->sequence};
    request = half_request_ && half_request_->half == key ? *half_request_
                                                          : HalfRequest{key, now, now + waiting->remaining() / 2};
    const bool all = now >= request->revoke_all_at;
    const auto revoked = leases_.revoke(key, all ? std::chrono::nanoseconds::max() : now - request->since);
    Metrics::add(metrics_.leases_revoked, revoked.size());
    for (const LeasePtr& lease : revoked) {
      budgets_.lost(lease->terms().host);
      log::info("lease_revoked name=\"{}\" host={} version={} reason=\"a writer waits for the half\" next_time_ms={}",
                lease->terms().name, lease->terms().host, to_string(retiring->version.id),
                budgets_.of(lease->terms().host).count());
    }
  }
  half_request_ = request;
  look_at_names_locked(now);
  return std::chrono::milliseconds(retiring_any ? 5 : 50);
}

}  // namespace deltasync::agent
