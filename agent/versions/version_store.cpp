#include "agent/versions/version_store.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace deltasync::agent {

VersionStore::VersionStore(const CoreOptions& options, AdoptedSegments adopted, Bell& bell,
                           std::shared_ptr<Reclaimer> reclaimer, Metrics& metrics)
    : options_(options),
      bell_(bell),
      reclaimer_(std::move(reclaimer)),
      metrics_(metrics),
      found_(adopted.newest),
      next_number_(adopted.next_number),
      generations_(std::move(adopted.generations)),
      ring_(options.ring_bytes_max, options.ring_entries_max) {
  snapshot_ = make_snapshot(generations_.empty() ? nullptr : generations_.front(), nullptr, nullptr, nullptr, ring_);
  bell_.follow(generations_.empty() ? nullptr : generations_.back());
}

SnapshotPtr VersionStore::snapshot() const {
  const std::lock_guard lock(mutex_);
  return snapshot_;
}

bool VersionStore::is_current(const Snapshot& snapshot) const {
  const std::lock_guard lock(mutex_);
  return snapshot_.get() == &snapshot;
}

std::vector<GenerationPtr> VersionStore::generations() const {
  const std::lock_guard lock(mutex_);
  return generations_;
}

GenerationPtr VersionStore::newest() const {
  const std::lock_guard lock(mutex_);
  return generations_.empty() ? nullptr : generations_.back();
}

std::uint64_t VersionStore::tiles_max() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t tiles = 0;
  for (const GenerationPtr& generation : generations_) tiles = std::max(tiles, generation->layout->tile_count());
  return tiles;
}

Behind VersionStore::behind(const VersionId& held) const {
  return behind(std::span(&held, 1)).front();
}

std::vector<Behind> VersionStore::behind(std::span<const VersionId> held) const {
  std::vector<Behind> all;
  all.reserve(held.size());
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  for (const VersionId& one : held) all.push_back(publications_.behind(one, now));
  return all;
}

void VersionStore::hear_of_epoch(std::uint64_t epoch) {
  if (epoch > kEpochHeardMax) return;
  std::uint64_t before = epoch_heard_;
  while (before < epoch && !epoch_heard_.compare_exchange_weak(before, epoch)) continue;
}

bool VersionStore::was_found(const VersionId& version) const noexcept {
  return version.epoch == found_.epoch && version.number <= found_.number;
}

std::vector<RingEntryPtr> VersionStore::adopt_ring(const ServedVersion& served) {
  return keeper_.adopt(served.generation->segment->path(), *served.generation->layout, served.version.id, served.root,
                       *served.digests);
}

void VersionStore::publish(ServedPtr served, std::vector<RingEntryPtr> deltas) {
  const GenerationPtr generation = served->generation;
  const std::uint64_t half_bytes = generation->layout->half_bytes();
  {
    const std::lock_guard lock(mutex_);
    if (std::find(generations_.begin(), generations_.end(), generation) == generations_.end()) return;
    ring_.set_bytes_max(options_.ring_bytes_max != 0 ? options_.ring_bytes_max : default_ring_bytes(half_bytes));
    std::vector<RingEntryPtr> evicted;
    if (deltas.empty()) evicted = ring_.clear();
    for (RingEntryPtr& delta : deltas) {
      for (RingEntryPtr& old : ring_.push(std::move(delta), half_bytes)) evicted.push_back(std::move(old));
    }
    for (RingEntryPtr& old : evicted) reclaimer_->retire(std::move(old));
    publications_.add(served->version.id, served->published_at);
    Metrics::add(metrics_.versions, 1);  // who sees the version finds it counted
    set_snapshot_locked(generation, std::move(served));
  }
  changes_.notify();
}

void VersionStore::publish_again(const ServedPtr& before, ServedPtr now, std::vector<RingEntryPtr> ring) {
  {
    const std::lock_guard lock(mutex_);
    if (snapshot_->served != before) return;
    for (RingEntryPtr& old : ring_.replace(std::move(ring))) reclaimer_->retire(std::move(old));
    set_snapshot_locked(before->generation, std::move(now));
  }
  changes_.notify();
}

bool VersionStore::announce(ServedPtr arriving) {
  {
    const std::lock_guard lock(mutex_);
    if (snapshot_->served || snapshot_->generation != arriving->generation) return false;
    GenerationPtr generation = arriving->generation;
    set_snapshot_locked(std::move(generation), nullptr, std::move(arriving));
  }
  changes_.notify();
  return true;
}

void VersionStore::withdraw(const ServedPtr& arriving) {
  {
    const std::lock_guard lock(mutex_);
    if (snapshot_->arriving != arriving) return;
    set_snapshot_locked(arriving->generation, nullptr);
  }
  changes_.notify();
}

void VersionStore::expect(RingEntryPtr delta) {
  {
    const std::lock_guard lock(mutex_);
    ahead_ = std::move(delta);
    if (!snapshot_->served) return;
    set_snapshot_locked(snapshot_->generation, snapshot_->served);
  }
  changes_.notify();
}

void VersionStore::expect_no_more(const RingEntryPtr& delta) {
  {
    const std::lock_guard lock(mutex_);
    if (ahead_ != delta) return;
    reclaimer_->retire(std::exchange(ahead_, nullptr));
    if (snapshot_->ahead != delta) return;
    set_snapshot_locked(snapshot_->generation, snapshot_->served);
  }
  changes_.notify();
}

std::vector<GenerationPtr> VersionStore::drop_old(const std::function<bool(std::uint64_t generation)>& idle) {
  std::vector<GenerationPtr> dropped;
  const std::lock_guard lock(mutex_);
  if (!snapshot_->served) return dropped;
  const std::uint64_t current = snapshot_->served->generation->number;
  std::erase_if(generations_, [&](const GenerationPtr& generation) {
    if (generation->number >= current || !idle(generation->number)) return false;
    dropped.push_back(generation);
    return true;
  });
  return dropped;
}

Result<GenerationPtr> VersionStore::create(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded) {
  const std::string name = segment_name(options_.name, next_number_);
  DS_ASSIGN(auto made, Generation::create({options_.shm_dir, name}, next_number_, std::move(layout), layout_encoded,
                                          sidecar_encoded));
  GenerationPtr created = reclaimer_->keep(std::move(made));
  ++next_number_;
  log::info("segment_created name={} half_bytes={} tensors={} layout={}", name, created->segment->half_bytes(),
            created->layout->tensors().size(), to_string(created->layout->digest()));
  {
    const std::lock_guard lock(mutex_);
    generations_.push_back(created);
    if (!snapshot_->served) set_snapshot_locked(created, nullptr);
  }
  bell_.follow(created);
  changes_.notify();
  return created;
}

Status VersionStore::remove(const GenerationPtr& generation) {
  GenerationPtr newest;
  {
    const std::lock_guard lock(mutex_);
    std::erase(generations_, generation);
    if (snapshot_->generation == generation) set_snapshot_locked(nullptr, nullptr);
    if (!generations_.empty()) newest = generations_.back();
  }
  bell_.follow(std::move(newest));
  changes_.notify();
  return generation->segment->remove_name();
}

Result<std::vector<std::uint64_t>> VersionStore::release_all(const std::string& why) {
  std::vector<GenerationPtr> released;
  {
    const std::lock_guard lock(mutex_);
    released.swap(generations_);
    for (RingEntryPtr& entry : ring_.clear()) reclaimer_->retire(std::move(entry));
    set_snapshot_locked(nullptr, nullptr);
  }
  bell_.follow(nullptr);
  changes_.notify();
  std::vector<std::uint64_t> numbers;
  for (const GenerationPtr& generation : released) {
    log::info("segment_removed name={} reason=\"{}\"", generation->segment->path().name, why);
    DS_TRY(generation->segment->remove_name());
    numbers.push_back(generation->number);
  }
  return numbers;
}

void VersionStore::set_snapshot_locked(GenerationPtr generation, ServedPtr served, ServedPtr arriving) {
  SnapshotPtr next = make_snapshot(std::move(generation), std::move(served), std::move(arriving), ahead_, ring_);
  if (next->served && next->generation->segment->in_place()) {  // else its files' names may be another agent's
    keeper_.keep(next->generation->segment->path(), next->ring, next->ring_bytes_max);
  } else {
    keeper_.forget();
  }
  reclaimer_->retire(std::exchange(snapshot_, std::move(next)));  // it may be the last to hold deltas
}

}  // namespace deltasync::agent
