#include "agent/behind.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "base/trace.hpp"

namespace deltasync::agent {
namespace {

/// Between two looks at a writer's progress; doubled while nothing comes.
constexpr auto kLookMin = std::chrono::milliseconds(1);
constexpr auto kLookMax = std::chrono::milliseconds(16);
constexpr std::size_t kPassedOverMax = 64;  ///< whole batches of other homes, in one look

}  // namespace

BehindDiff::BehindDiff(unsigned threads, Metrics::Counter& diffed, const HomeNodesPtr& home_nodes) : diffed_(diffed) {
  if (threads == 0) return;
  thread_ = start_background(
      "behind", threads, [this](ThreadPool& pool) { work(pool); }, home_nodes);
}

BehindDiff::~BehindDiff() {
  if (!enabled()) return;
  static_cast<void>(end());
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BehindDiff::begin(BehindJob job) {
  if (!enabled() || !job.generation->role->hold(job.fill)) return;
  const Generation& generation = *job.generation;
  std::vector<std::uint32_t> pending(generation.batches.size());
  std::iota(pending.begin(), pending.end(), 0u);
  auto encoding = std::make_unique<delta::Encoding>(*generation.layout, generation.batches,
                                                    generation.half(job.base_half), generation.half(job.fill.half),
                                                    *job.base_digests, job.form, generation.batch_homes);
  job_ = std::move(job);
  {
    const std::lock_guard lock(mutex_);
    encoding_ = std::move(encoding);
    pending_ = std::move(pending);
    next_ = 0;
    wanted_ = true;
  }
  changed_.notify_all();
}

std::optional<BehindWork> BehindDiff::end() {
  if (!job_) return std::nullopt;
  BehindWork work;
  {
    std::unique_lock lock(mutex_);
    wanted_ = false;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_; });
    work.encoding = std::move(encoding_);
  }
  work.job = *std::exchange(job_, std::nullopt);
  work.job.generation->role->unhold(work.job.fill);
  return work;
}

void BehindDiff::work(ThreadPool& pool) {
  std::unique_lock lock(mutex_);
  auto look = kLookMin;
  while (!closing_) {
    if (!wanted_) {
      look = kLookMin;
      changed_.wait(lock, [this] { return closing_ || wanted_; });
      continue;
    }
    busy_ = true;
    lock.unlock();
    const bool advanced = advance(pool);
    lock.lock();
    busy_ = false;
    if (!wanted_) {
      changed_.notify_all();
    } else if (advanced) {
      look = kLookMin;
    } else {
      changed_.wait_for(lock, look, [this] { return closing_ || !wanted_; });
      look = std::min(2 * look, kLookMax);
    }
  }
}

/// At most `most` in all, and of each home no more than there is room for. From where the last look ended, so that each
/// costs what it finds; what is passed over is met again later.
void BehindDiff::take_whole(std::vector<std::uint32_t>& whole, std::size_t most, std::vector<unsigned>* room_of_home) {
  const Generation& generation = *job_->generation;
  std::size_t passed_over = 0;
  for (std::size_t looked = pending_.size(); looked > 0 && whole.size() < most && passed_over < kPassedOverMax;
       --looked) {
    if (next_ >= pending_.size()) next_ = 0;
    const std::uint32_t batch = pending_[next_];
    if (generation.role->elements_done(job_->fill, batch) != generation.batch_elements[batch]) {
      ++next_;
      continue;
    }
    if (room_of_home != nullptr) {
      unsigned& room = (*room_of_home)[generation.batch_homes[batch]];
      if (room == 0) {
        ++next_;
        ++passed_over;
        continue;
      }
      --room;
    }
    whole.push_back(batch);
    pending_[next_] = pending_.back();
    pending_.pop_back();
  }
}

/// A round of whole batches: one for each thread, of its own home if there is one, else of any.
std::vector<std::uint32_t> BehindDiff::take_whole(const ThreadPool& pool) {
  std::vector<std::uint32_t> whole;
  if (!pool.homes().empty() && !job_->generation->batch_homes.empty()) {
    std::vector<unsigned> room;
    for (const std::uint32_t home : pool.homes()) {
      if (room.size() <= home) room.resize(home + 1);
      ++room[home];
    }
    const auto& homes = job_->generation->batch_homes;
    room.resize(std::max<std::size_t>(room.size(), *std::max_element(homes.begin(), homes.end()) + 1));
    const std::size_t began = next_;
    take_whole(whole, pool.size(), &room);
    next_ = began;
  }
  take_whole(whole, pool.size(), nullptr);
  return whole;
}

bool BehindDiff::advance(ThreadPool& pool) {
  const std::vector<std::uint32_t> whole = take_whole(pool);
  if (whole.empty()) return false;  // no round of the pool, which would wait for each of its threads to get a core
  const trace::Span span("diff behind", job_->fill.version.id);
  encoding_->run(whole, pool);
  Metrics::add(diffed_, whole.size());
  return true;
}

std::optional<std::uint64_t> spot_check(const Generation& generation, unsigned half,
                                        const std::vector<std::uint64_t>& digests, std::uint64_t tiles,
                                        std::uint64_t& cursor) {
  const Layout& layout = *generation.layout;
  for (std::uint64_t i = 0; i < std::min(tiles, layout.tile_count()); ++i) {
    const std::uint64_t tile = cursor++ % layout.tile_count();
    if (delta::tile_digest(layout, generation.half(half), tile) != digests[tile]) return tile;
  }
  return std::nullopt;
}

}  // namespace deltasync::agent
