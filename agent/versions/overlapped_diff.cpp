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
constexpr std::size_t kPassedOverMax = 64;  ///< whole batches of other nodes, in one look

}  // namespace

OverlappedDiff::OverlappedDiff(unsigned threads, Metrics::Counter& diffed, const NumaPlacementPtr& numa_placement,
                               std::function<void()> before_round)
    : diffed_(diffed), before_round_(std::move(before_round)) {
  if (threads == 0) return;
  thread_ = start_background(
      "overlap", threads, [this](ThreadPool& pool) { work(pool); }, numa_placement);
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
  made->encoding = std::make_unique<delta::Encoding>(*generation.layout, generation.batches,
                                                     generation.half(job.base_half), generation.half(job.fill.half),
                                                     *job.base_digests, job.form, generation.batch_nodes);
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

/// At most `most` in all, and of each node no more than there is room for. From where the last look ended, so that each
/// costs what it finds; what is passed over is met again later.
void OverlappedDiff::take_whole(Work& work, std::vector<std::uint32_t>& whole, std::size_t most,
                                std::vector<unsigned>* room_of_node) {
  const Generation& generation = *work.job.generation;
  std::size_t passed_over = 0;
  for (std::size_t looked = work.pending.size(); looked > 0 && whole.size() < most && passed_over < kPassedOverMax;
       --looked) {
    if (work.next >= work.pending.size()) work.next = 0;
    const std::uint32_t batch = work.pending[work.next];
    if (generation.role->elements_done(work.job.fill, batch) != generation.batch_elements[batch]) {
      ++work.next;
      continue;
    }
    if (room_of_node != nullptr) {
      unsigned& room = (*room_of_node)[generation.batch_nodes[batch]];
      if (room == 0) {
        ++work.next;
        ++passed_over;
        continue;
      }
      --room;
    }
    whole.push_back(batch);
    work.pending[work.next] = work.pending.back();
    work.pending.pop_back();
  }
}

/// A round of whole batches: one for each thread, of its own node if there is one, else of any.
std::vector<std::uint32_t> OverlappedDiff::take_whole(Work& work, const ThreadPool& pool) {
  std::vector<std::uint32_t> whole;
  if (!pool.worker_nodes().empty() && !work.job.generation->batch_nodes.empty()) {
    std::vector<unsigned> room;
    for (const std::uint32_t node : pool.worker_nodes()) {
      if (room.size() <= node) room.resize(node + 1);
      ++room[node];
    }
    const auto& nodes = work.job.generation->batch_nodes;
    room.resize(std::max<std::size_t>(room.size(), *std::max_element(nodes.begin(), nodes.end()) + 1));
    const std::size_t began = work.next;
    take_whole(work, whole, pool.size(), &room);
    work.next = began;
  }
  take_whole(work, whole, pool.size(), nullptr);
  return whole;
}

bool OverlappedDiff::advance(Work& work, ThreadPool& pool) {
  const std::vector<std::uint32_t> whole = take_whole(work, pool);
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
