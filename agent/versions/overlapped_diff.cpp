#include "agent/versions/overlapped_diff.hpp"

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

}  // namespace

OverlappedDiff::OverlappedDiff(unsigned threads, Metrics::Counter& diffed, std::function<void()> before_round)
    : diffed_(diffed), before_round_(std::move(before_round)) {
  if (threads == 0) return;
  thread_ = start_background("overlap", threads, [this](ThreadPool& pool) { work(pool); });
}

OverlappedDiff::~OverlappedDiff() {
  if (!enabled()) return;
  end();
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void OverlappedDiff::begin(OverlappedDiffJob job) {
  if (!enabled() || !job.generation->role->hold(job.fill)) return;
  const Generation& generation = *job.generation;
  auto made = std::make_shared<Work>();
  made->pending.resize(generation.batches.size());
  std::iota(made->pending.begin(), made->pending.end(), 0u);
  made->encoding =
      std::make_unique<delta::Encoding>(*generation.layout, generation.batches, generation.half(job.base_half),
                                        generation.half(job.fill.half), *job.base_digests, job.form);
  made->job = std::move(job);
  {
    const std::lock_guard lock(mutex_);
    work_ = made;
  }
  followed_ = std::move(made);
  changed_.notify_all();
}

std::shared_ptr<OverlappedDiffWork> OverlappedDiff::end() {
  if (!followed_) return nullptr;
  {
    const std::lock_guard lock(mutex_);
    work_.reset();
  }
  changed_.notify_all();
  followed_->job.generation->role->unhold(followed_->job.fill);
  return std::exchange(followed_, nullptr);
}

void OverlappedDiff::work(ThreadPool& pool) {
  std::unique_lock lock(mutex_);
  auto look = kLookMin;
  while (!closing_) {
    if (!work_) {
      look = kLookMin;
      changed_.wait(lock, [this] { return closing_ || work_; });
      continue;
    }
    std::shared_ptr<Work> now = work_;
    lock.unlock();
    const bool advanced = advance(*now, pool);
    lock.lock();
    if (work_ != now) {
      lock.unlock();
      now.reset();  // it may be the last to hold a generation
      lock.lock();
    } else if (advanced) {
      look = kLookMin;
    } else {
      changed_.wait_for(lock, look, [&] { return closing_ || work_ != now; });
      look = std::min(2 * look, kLookMax);
    }
  }
}

/// At most `most`, from where the last look ended, so that each costs what it finds.
std::vector<std::uint32_t> OverlappedDiff::take_whole(Work& work, std::size_t most) {
  std::vector<std::uint32_t> whole;
  const Generation& generation = *work.job.generation;
  for (std::size_t looked = work.pending.size(); looked > 0 && whole.size() < most; --looked) {
    if (work.next >= work.pending.size()) work.next = 0;
    const std::uint32_t batch = work.pending[work.next];
    if (generation.role->elements_done(work.job.fill, batch) != generation.batch_elements[batch]) {
      ++work.next;
      continue;
    }
    whole.push_back(batch);
    work.pending[work.next] = work.pending.back();
    work.pending.pop_back();
  }
  return whole;
}

bool OverlappedDiff::advance(Work& work, ThreadPool& pool) {
  const std::vector<std::uint32_t> whole = take_whole(work, pool.size());
  if (whole.empty()) return false;  // no round of the pool, which would wait for each of its threads to get a core
  if (before_round_) before_round_();
  const trace::Span span("overlapped diff", work.job.fill.version.id);
  Metrics::add(diffed_, work.encoding->run_overlapped(whole, pool));
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
