#include "agent/versions/publisher.hpp"

#include <algorithm>
#include <utility>

#include "agent/versions/handed_delta.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "delta/geometry.hpp"

namespace deltasync::agent {
namespace {

/// How soon to look again without a signal: at leases of a retiring half, at dead writers.
constexpr auto kBusyWait = std::chrono::milliseconds(10);
constexpr auto kIdleWait = std::chrono::milliseconds(100);

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

HalfKey key_of(const Generation& generation, const shm::HalfView& view) {
  return {generation.number, view.half, view.sequence};
}

bool is_base(const OverlappedDiffJob& job, const ServedVersion& served) {
  return job.generation == served.generation && job.base_half == served.half.half &&
         job.base_sequence == served.half.sequence;
}

}  // namespace

Publisher::Publisher(const CoreOptions& options, VersionStore& versions, LeaseTable& leases, Damage& damage,
                     const Origin& origin, Arrival& arrival, DeltaArrival& delta_arrival, Bell& bell, Metrics& metrics)
    : options_(options),
      versions_(versions),
      leases_(leases),
      damage_(damage),
      origin_(origin),
      arrival_(arrival),
      delta_arrival_(delta_arrival),
      bell_(bell),
      metrics_(metrics),
      pool_(std::max(1u, options.threads), "encode"),
      overlapped_diff_(options.overlap_threads, metrics.batches_overlapped, options.before_overlapped_diff) {}

void Publisher::start() {
  thread_ = std::thread([this] { work(); });
}

void Publisher::ask_to_stop() {
  stop_ = true;
  bell_.ring();
}

void Publisher::stop() {
  ask_to_stop();
  if (thread_.joinable()) thread_.join();
}

void Publisher::work() {
  set_thread_name("publisher");
  while (!stop_) {
    bool worked = false;
    for (const GenerationPtr& generation : versions_.generations()) worked |= maintain(generation);
    damage_.look_at_suspects();
    follow_fill(versions_.snapshot()->served);
    arrival_.look();
    delta_arrival_.look();
    drop_old_generations();
    if (!worked && !stop_) wait_for_work();
  }
}

void Publisher::wait_for_work() {
  const GenerationPtr generation = bell_.wait_for_generation(kIdleWait);
  if (!generation || stop_) return;
  const bool retiring = generation->role->retiring().has_value();
  generation->role->wait_for_change(Deadline::after(retiring ? kBusyWait : kIdleWait));
}

/// True if something moved, so that it is worth looking again at once.
bool Publisher::maintain(const GenerationPtr& generation) {
  shm::AgentRole& role = *generation->role;
  for (const unsigned slot : role.reap()) {
    log::warn("writer_died generation={} slot={}", generation->number, slot);
  }
  const SnapshotPtr now = versions_.snapshot();
  if (now->served && generation->number < now->served->generation->number) return false;  // only its readers remain
  const auto serves = [&](const shm::HalfView& view) {
    return now->served && now->served->half == key_of(*generation, view);
  };
  bool worked = false;
  // SYNC POINT plan: what is served was looked at first. A lease that we do not see now begins too late to count.
  if (const auto retiring = role.retiring(); retiring && !serves(*retiring)) {
    if (leases_.idle(key_of(*generation, *retiring))) {
      role.retire_done(*retiring);
      worked = true;
    }
  }
  const auto active = role.active();
  if (active && !serves(*active)) {
    serve_first(generation, *active);
    return true;
  }
  const auto sealed = role.sealed();
  if (!sealed) return worked;
  if (active) {
    serve_next(now->served, *sealed);
    return true;
  }
  if (const auto activated = role.activate(*sealed); !activated) {
    log::error("activate_failed error=\"{}\"", activated.error().to_string());
    return worked;
  }
  serve_first(generation, *sealed);
  return true;
}

/// A version without one before it to diff against: after a start, or the first of a layout. What an agent before this
/// one kept of the deltas that led to it is the ring.
void Publisher::serve_first(const GenerationPtr& generation, const shm::HalfView& active) {
  const auto start = std::chrono::steady_clock::now();
  const trace::Span span("publish", active.version.id);
  trace::name_version(active.version);
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(generation->layout->tile_count()));
  {
    const trace::Span digesting("digest", {{"bytes", generation->layout->half_bytes()}});
    delta::half_digests(*generation->layout, generation->half(active.half), digests, pool_);
  }

  auto served = std::make_shared<ServedVersion>();
  served->generation = generation;
  served->half = key_of(*generation, active);
  served->version = active.version;
  served->relayed = origin_.is_relays();
  served->root = delta::root_digest(digests);
  served->digests = std::make_shared<const std::vector<std::uint64_t>>(std::move(digests));
  served->digest_s = seconds_since(start);
  served->published_at = std::chrono::steady_clock::now();
  served->found_at_start = versions_.was_found(active.version.id);
  Metrics::add(metrics_.digest_seconds, served->digest_s);
  log::info("version_published version=\"{}\" root={} generation={} digest_s={:.4f}", to_string(active.version),
            to_string(served->root), generation->number, served->digest_s);
  std::vector<RingEntryPtr> kept;
  if (!versions_.snapshot()->served) kept = versions_.adopt_ring(*served);
  const trace::Span installing("install");
  versions_.publish(std::move(served), std::move(kept));
}

/// `before` is ACTIVE and served; `sealed` is the other half of the same generation.
void Publisher::serve_next(const ServedPtr& before, const shm::HalfView& sealed) {
  const GenerationPtr generation = before->generation;
  trace::Span span("publish", sealed.version.id);
  trace::name_version(sealed.version);
  if (const auto activated = generation->role->activate(sealed); !activated) {
    log::error("activate_failed error=\"{}\"", activated.error().to_string());
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::uint64_t> digests;
  auto served = std::make_shared<ServedVersion>();
  auto made = diff(before, sealed, *served, digests);
  if (!made) return serve_first(generation, sealed);
  delta::Delta delta = std::move(*made);
  const double encode_s = seconds_since(start);
  span.set({"bytes", delta.frame_bytes});

  served->generation = generation;
  served->half = key_of(*generation, sealed);
  served->version = sealed.version;
  served->root = delta.to_root;
  served->digests = std::make_shared<const std::vector<std::uint64_t>>(std::move(digests));
  served->delta_bytes = delta.frame_bytes;
  served->changed = delta.changed;
  served->encode_s = encode_s;
  served->published_at = std::chrono::steady_clock::now();
  Metrics::add(metrics_.deltas, 1);
  Metrics::add(metrics_.delta_bytes, delta.frame_bytes);
  Metrics::add(metrics_.elements_changed, delta.changed);
  Metrics::add(metrics_.encode_seconds, encode_s);
  metrics_.diff.observe(encode_s);
  log::info("version_published version=\"{}\" root={} generation={} encode_s={:.4f} delta_bytes={} changed={}",
            to_string(sealed.version), to_string(served->root), generation->number, encode_s, delta.frame_bytes,
            delta.changed);
  auto entry = RingEntry::make(std::move(delta), before->version, sealed.version, encode_s,
                               changed_digests(*before->digests, *served->digests));
  entry->from_former = before->former;
  const trace::Span installing("install");
  versions_.publish(std::move(served), {std::move(entry)});
}

/// Keeps the open fill, if it is the served version's next, followed by the overlapped diff.
void Publisher::follow_fill(const ServedPtr& served) {
  if (!overlapped_diff_.enabled()) return;
  if (const OverlappedDiffJob* job = overlapped_diff_.job()) {
    const shm::HalfStatus now = shm::inspect_half(*job->generation->segment, job->fill.half);
    const bool goes_on = now.state == shm::HalfState::filling || now.state == shm::HalfState::sealed;
    if (goes_on && now.sequence == job->fill.sequence && served && is_base(*job, *served)) return;
    overlapped_diff_.end();  // it was aborted, or what it starts from is not served any more
  }
  const auto fill = served ? served->generation->role->filling() : std::nullopt;
  if (!fill || fill->half == served->half.half) return;
  overlapped_diff_.begin(
      {served->generation, *fill, served->half.half, served->half.sequence, served->digests, options_.form});
}

/// The delta from the served version to a sealed one, and the digests of the latter. Nothing if it is damaged.
std::optional<delta::Delta> Publisher::diff(const ServedPtr& before, const shm::HalfView& sealed, ServedVersion& now,
                                            std::vector<std::uint64_t>& digests) {
  const trace::Span span("diff");
  const Generation& generation = *before->generation;
  const delta::EncodeRequest request{before->version.id, sealed.version.id, before->root, options_.form};
  std::shared_ptr<OverlappedDiffWork> work = overlapped_diff_.end();
  if (auto handed = take_handed_delta(*before, sealed, digests)) {
    Metrics::add(metrics_.handed_deltas, 1);
    now.relayed = true;
    now.damaged = damage_.find_in(*before->generation, sealed, digests, pool_);
    return handed;
  }
  now.relayed = origin_.is_relays();
  if (!work || !is_base(work->job, *before) || work->job.fill.half != sealed.half ||
      work->job.fill.sequence != sealed.sequence) {
    work = std::make_shared<OverlappedDiffWork>();
    work->encoding =
        std::make_unique<delta::Encoding>(*generation.layout, generation.batches, generation.half(before->half.half),
                                          generation.half(sealed.half), *before->digests, options_.form);
  }
  delta::Delta delta = work->encoding->finish(request, pool_);
  digests = work->encoding->take_digests();
  Metrics::add(metrics_.batches_after, work->encoding->rest());
  Metrics::add(metrics_.elements_compared, generation.layout->elements());
  return damage_.repair_diff(*before, sealed, std::move(delta), digests, pool_);
}

/// Generations before the served one go when their last reader has left.
void Publisher::drop_old_generations() {
  const auto dropped = versions_.drop_old([this](std::uint64_t number) { return leases_.generation_idle(number); });
  for (const GenerationPtr& generation : dropped) {
    const auto removed = generation->segment->remove_name();
    if (removed) {
      log::info("segment_removed name={} reason=\"a newer layout is served\"", generation->segment->path().name);
    } else {
      log::warn("segment_remove_failed error=\"{}\"", removed.error().to_string());
    }
  }
}

}  // namespace deltasync::agent
