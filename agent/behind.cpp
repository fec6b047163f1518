#include "agent/behind.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <numeric>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"

namespace deltasync::agent {
namespace {

/// Between two looks at a writer's progress; doubled while nothing comes.
constexpr auto kLookMin = std::chrono::milliseconds(1);
constexpr auto kLookMax = std::chrono::milliseconds(16);
constexpr int kNice = 19;  // at 10, copies on all cores took 40 % longer; at 19 no longer than alone

ByteSpan half_of(const Generation& generation, unsigned half) {
  return ByteSpan(generation.segment->half(half)).first(static_cast<std::size_t>(generation.layout->half_bytes()));
}

}  // namespace

BehindDiff::BehindDiff(unsigned threads, Metrics::Counter& diffed) : diffed_(diffed) {
  if (threads == 0) return;
  std::promise<void> started;
  auto outcome = started.get_future();
  thread_ = std::thread([this, threads, started = std::move(started)]() mutable {
    set_thread_name("behind");
    ::setpriority(PRIO_PROCESS, 0, kNice);  // of this thread, and of those that it starts
    std::optional<ThreadPool> pool;
    try {
      pool.emplace(threads, "behind");
    } catch (const std::system_error&) {
      return started.set_exception(std::current_exception());
    }
    started.set_value();
    work(*pool);
  });
  try {
    outcome.get();
  } catch (const std::system_error&) {
    thread_.join();
    throw;
  }
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
  auto encoding =
      std::make_unique<delta::Encoding>(*generation.layout, generation.batches, half_of(generation, job.base_half),
                                        half_of(generation, job.fill.half), *job.base_digests, job.form);
  job_ = std::move(job);
  {
    const std::lock_guard lock(mutex_);
    encoding_ = std::move(encoding);
    pending_ = std::move(pending);
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

bool BehindDiff::advance(ThreadPool& pool) {
  const Generation& generation = *job_->generation;
  std::vector<std::uint32_t> whole;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    const std::uint32_t batch = pending_[i];
    const bool take = whole.size() < pool.size() &&
                      generation.role->elements_done(job_->fill, batch) == generation.batch_elements[batch];
    if (take) {
      whole.push_back(batch);
    } else {
      pending_[kept++] = batch;
    }
  }
  pending_.resize(kept);
  if (whole.empty()) return false;
  const trace::Span span("diff behind", job_->fill.version.id);
  encoding_->run(whole, pool);
  Metrics::add(diffed_, whole.size());
  return true;
}

bool spot_check(const Generation& generation, unsigned half, const std::vector<std::uint64_t>& digests,
                std::uint64_t tiles, std::uint64_t& cursor) {
  const Layout& layout = *generation.layout;
  const ByteSpan bytes = half_of(generation, half);
  for (std::uint64_t i = 0; i < std::min(tiles, layout.tile_count()); ++i) {
    const Tile tile = layout.tile(cursor++ % layout.tile_count());
    const Tensor& tensor = layout.tensors()[tile.tensor];
    const std::byte* const first =
        bytes.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
    const std::uint64_t digest =
        delta::tile_digest(first, tensor.row_bytes(), tile.rect.rows, tile.rect.cols * tensor.element_bytes);
    if (digest != digests[tile.index]) return false;
  }
  return true;
}

}  // namespace deltasync::agent
