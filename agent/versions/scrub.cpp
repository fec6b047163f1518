#include "agent/versions/scrub.hpp"

#include <ctime>

#include <algorithm>
#include <utility>

#include "agent/background.hpp"
#include "agent/versions/generation.hpp"
#include "base/log.hpp"
#include "base/racing_reads.hpp"
#include "format/tiling.hpp"

namespace deltasync::agent {
namespace {

using std::chrono::nanoseconds;

constexpr std::uint64_t kStepBytes = 4u << 20;
constexpr std::uint64_t kBytesPerSecondMin = 4u << 20;  ///< small models take no longer than they have to
constexpr auto kNothingServed = std::chrono::seconds(1);

nanoseconds thread_cpu() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return std::chrono::seconds(t.tv_sec) + nanoseconds(t.tv_nsec);
}

nanoseconds seconds(double s) {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(s));
}

}  // namespace

Scrub::Scrub(const ScrubOptions& options, ScrubSource source) : options_(options), source_(std::move(source)) {
  if (options_.pass.count() <= 0 || options_.cpu <= 0) return;
  thread_ = start_background("scrub", 1, [this](ThreadPool&) { work(); });
}

Scrub::~Scrub() {
  stop();
}

void Scrub::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Scrub::work() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    lock.unlock();
    const nanoseconds before = thread_cpu();
    const Step step = read_some();
    const nanoseconds pause = pause_after(step, thread_cpu() - before);
    lock.lock();
    changed_.wait_for(lock, pause, [this] { return stopped_; });
  }
}

/// As long as the pass may take, and as the processor's share asks for.
nanoseconds Scrub::pause_after(const Step& step, nanoseconds cpu) const {
  if (step.bytes == 0) return kNothingServed;
  const double pass_s = std::chrono::duration<double>(options_.pass).count();
  const double bytes_per_s = std::max<double>(kBytesPerSecondMin, static_cast<double>(step.half_bytes) / pass_s);
  const nanoseconds by_pass = seconds(static_cast<double>(step.bytes) / bytes_per_s);
  const nanoseconds by_cpu = seconds(std::chrono::duration<double>(cpu).count() / options_.cpu);
  return std::max(by_pass, by_cpu);
}

/// Nobody waits for this thread: what it reads counts if the half still had that content afterwards.
Scrub::Step Scrub::read_some() {
  Step step;
  source_.with_served([&](const ScrubSource::Half& served) {
    const Layout& layout = *served.generation.layout;
    const std::uint64_t tiles = layout.tile_count();
    step.half_bytes = layout.half_bytes();
    std::vector<std::uint64_t> wrong;
    std::uint64_t at = cursor_ < tiles ? cursor_ : 0;
    {
      const RacingReads racing;
      for (; at < tiles && step.bytes < kStepBytes; ++at) {
        const Tile tile = tile_of(layout, at);
        step.bytes += tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
        const ByteSpan half = served.generation.half(served.key.half);
        if (delta::tile_digest(layout, half, at) != served.digests[static_cast<std::size_t>(at)]) wrong.push_back(at);
      }
    }
    if (!shm::still_holds(*served.generation.segment, served.key.half, served.key.sequence)) return;
    cursor_ = at == tiles ? 0 : at;
    if (!wrong.empty()) source_.found(served.key, wrong);
    source_.counted(step.bytes, at == tiles);
  });
  return step;
}

}  // namespace deltasync::agent
