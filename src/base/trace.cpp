#include "base/trace.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <ctime>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace deltasync::trace {
namespace {

constexpr std::size_t kRingsMax = 256;  ///< threads whose spans are kept; then those that ended first go
constexpr std::size_t kTracksMax = 4096;
constexpr std::size_t kVersionsMax = 512;
constexpr std::size_t kClocksMax = 256;
constexpr std::size_t kWords = sizeof(Event) / sizeof(std::uint64_t);
using Words = std::array<std::uint64_t, kWords>;

/// The newest spans of one thread, which alone writes. Entry i lies in slot i % capacity.
///
/// SYNC POINT: push() stores the words of entry i (release) after it has stored i in `next_`. A reader that loads a
/// word of entry i (acquire) therefore finds next_ ≥ i afterwards, and throws away entry i − capacity, whose words
/// entry i was written over. Without it a reader takes the first half of one span and the second of another.
class Ring {
 public:
  Ring(std::size_t capacity, std::int32_t tid, std::string name)
      : capacity_(capacity),
        words_(std::make_unique<std::atomic<std::uint64_t>[]>(capacity * kWords)),
        tid_(tid),
        name_(std::move(name)) {}

  void push(const Event& event) noexcept {
    const std::uint64_t at = next_.load(std::memory_order_relaxed);
    const auto words = std::bit_cast<Words>(event);
    auto* const slot = words_.get() + at % capacity_ * kWords;
    for (std::size_t i = 0; i < kWords; ++i) slot[i].store(words[i], std::memory_order_release);
    next_.store(at + 1, std::memory_order_release);
  }

  ThreadRecord snapshot() const {
    ThreadRecord record;
    record.tid = tid_;
    record.name = name_;
    const std::uint64_t end = next_.load(std::memory_order_acquire);
    const std::uint64_t first = end > capacity_ ? end - capacity_ : 0;
    record.events.reserve(static_cast<std::size_t>(end - first));
    for (std::uint64_t i = first; i < end; ++i) {
      const auto* const slot = words_.get() + i % capacity_ * kWords;
      Words words;
      for (std::size_t w = 0; w < kWords; ++w) words[w] = slot[w].load(std::memory_order_acquire);
      record.events.push_back(std::bit_cast<Event>(words));
    }
    // Entry `now` may be under way already, in the slot of entry now − capacity.
    const std::uint64_t now = next_.load(std::memory_order_acquire);
    const std::uint64_t whole_from = std::clamp(now + 1 > capacity_ ? now + 1 - capacity_ : 0, first, end);
    record.events.erase(record.events.begin(), record.events.begin() + static_cast<std::ptrdiff_t>(whole_from - first));
    record.dropped = whole_from;
    return record;
  }

  std::uint64_t recorded() const noexcept { return next_.load(std::memory_order_relaxed); }
  void thread_ended() noexcept { ended_.store(true, std::memory_order_relaxed); }
  bool ended() const noexcept { return ended_.load(std::memory_order_relaxed); }

 private:
  const std::uint64_t capacity_;
  const std::unique_ptr<std::atomic<std::uint64_t>[]> words_;
  const std::int32_t tid_;
  const std::string name_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<bool> ended_{false};
};

/// What belongs to the process and not to a thread.
struct Registry {
  std::mutex mutex;
  std::string process;  // protected by mutex, as all below
  std::uint32_t spans_per_thread = 0;
  std::uint32_t sessions = 0;  // a child of fork() counts on, so that no span of its parent's is taken for its own
  bool started = false;
  std::vector<std::shared_ptr<Ring>> rings;  // in the order of the threads' first spans
  std::deque<std::pair<std::uint32_t, std::string>> tracks;
  std::uint32_t last_track = 0;
  std::deque<Version> versions;
  std::deque<ClockSample> clocks;
  std::uint64_t lost = 0;

  void clear() {
    rings.clear();
    tracks.clear();
    versions.clear();
    clocks.clear();
    lost = 0;
  }
};

Registry* make_registry();

/// Never destroyed: threads may outlive main().
Registry& registry() {
  static auto* const made = make_registry();
  return *made;
}

/// A thread's own part.
struct Local {
  std::shared_ptr<Ring> ring;
  std::uint32_t session = 0;  ///< that `ring` belongs to
  ~Local() {
    if (ring) ring->thread_ended();
  }
};
thread_local Local t_local;
thread_local Span* t_innermost = nullptr;

/// A child of fork() begins without a record: what its parent recorded is the parent's to write, and the threads that
/// the rings belong to are not there. Nobody holds the mutex across a fork, so that the child never waits for it.
Registry* make_registry() {
  auto* const made = new Registry;
  ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     detail::session.store(0, std::memory_order_relaxed);
                     t_local.ring.reset();
                     t_local.session = 0;
                     t_innermost = nullptr;
                     registry().started = false;
                     registry().clear();
                     registry().mutex.unlock();
                   });
  return made;
}

std::string thread_name() {
  std::array<char, 16> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  return name.data();
}

/// The first span of this thread in a session. Without memory its spans are lost, and counted.
void attach(std::uint32_t session) noexcept {
  t_local.ring.reset();
  t_local.session = session;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (session != all.sessions) return;
  try {
    if (all.rings.size() >= kRingsMax) {
      const auto old = std::find_if(all.rings.begin(), all.rings.end(), [](const auto& r) { return r->ended(); });
      if (old == all.rings.end()) return;
      all.lost += (*old)->recorded();
      all.rings.erase(old);
    }
    auto ring =
        std::make_shared<Ring>(all.spans_per_thread, static_cast<std::int32_t>(::syscall(SYS_gettid)), thread_name());
    all.rings.push_back(ring);
    t_local.ring = std::move(ring);
  } catch (const std::exception&) {
    return;
  }
}

/// `session`: that the event began in.
void push(const Event& event, std::uint32_t session) noexcept {
  if (session == 0 || session != detail::session.load(std::memory_order_relaxed)) return;
  if (t_local.session != session) attach(session);
  if (t_local.ring) return t_local.ring->push(event);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  ++all.lost;
}

}  // namespace

std::uint64_t now_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

// ---- spans -------------------------------------------------------------------------------------------------------

void Event::start(const char* what, const VersionId& of, std::uint32_t on_track, Args with) noexcept {
  name = what;
  version = of;
  track = on_track;
  texts = 0;
  for (auto& arg : args) arg = {nullptr, 0};
  for (const Arg& arg : with) add(arg);
  begin_ns = now_ns();
}

void Event::add(const Arg& arg) noexcept {
  for (std::size_t i = 0; i < kArgsMax; ++i) {
    if (args[i].name != nullptr) continue;
    args[i] = {arg.name, arg.text == nullptr ? arg.value : reinterpret_cast<std::uintptr_t>(arg.text)};
    if (arg.text != nullptr) texts |= 1u << i;
    return;
  }
}

void Span::open(const char* name, const VersionId& version, Args args) noexcept {
  around_ = t_innermost;
  t_innermost = this;
  event_.start(name, !version.valid() && around_ != nullptr ? around_->event_.version : version, 0, args);
}

void Span::end() noexcept {
  t_innermost = around_;
  event_.end_ns = now_ns();
  if (event_.end_ns - event_.begin_ns >= shortest_ns_) push(event_, session_);
}

Context context() noexcept {
  if (t_innermost == nullptr) return {};
  return {t_innermost->event_.name, t_innermost->event_.version};
}

void note(const Arg& arg) noexcept {
  if (t_innermost != nullptr) t_innermost->event_.add(arg);
}

void record(const char* name, const VersionId& version, std::uint64_t begin_ns, std::uint64_t end_ns,
            Args args) noexcept {
  const std::uint32_t session = detail::session.load(std::memory_order_relaxed);
  if (session == 0) return;
  Event event;
  event.start(name, version, 0, args);
  event.begin_ns = begin_ns;
  event.end_ns = end_ns;
  push(event, session);
}

void TrackSpan::end() noexcept {
  event_.end_ns = now_ns();
  push(event_, session_);
}

// ---- the process -------------------------------------------------------------------------------------------------

std::uint32_t add_track(const std::string& name) {
  if (!on()) return 0;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (all.tracks.size() >= kTracksMax) all.tracks.pop_front();
  all.tracks.emplace_back(++all.last_track, name);
  return all.last_track;
}

void name_version(const Version& version) {
  if (!on() || version.label.empty()) return;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (std::find(all.versions.begin(), all.versions.end(), version) != all.versions.end()) return;
  if (all.versions.size() >= kVersionsMax) all.versions.pop_front();
  all.versions.push_back(version);
}

void add_clock_sample(const ClockSample& sample) {
  if (!on() || sample.clock == clock_id()) return;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (all.clocks.size() >= kClocksMax) all.clocks.pop_front();
  all.clocks.push_back(sample);
}

Record snapshot() {
  Record record;
  std::vector<std::shared_ptr<Ring>> rings;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    record.started = all.started;
    record.process = all.process;
    record.tracks.assign(all.tracks.begin(), all.tracks.end());
    record.versions.assign(all.versions.begin(), all.versions.end());
    record.clocks.assign(all.clocks.begin(), all.clocks.end());
    record.lost = all.lost;
    rings = all.rings;
  }
  for (const auto& ring : rings) record.threads.push_back(ring->snapshot());
  return record;
}

}  // namespace deltasync::trace

namespace deltasync {

void start_timeline(std::string process, std::uint32_t spans_per_thread) {
  trace::clock_id();  // made now, not by a thread that a fork may come upon in the middle
  trace::Registry& all = trace::registry();
  const std::lock_guard lock(all.mutex);
  trace::detail::session.store(0, std::memory_order_relaxed);
  all.process = std::move(process);
  all.spans_per_thread = std::max(spans_per_thread, 1u);
  all.clear();
  all.started = true;
  trace::detail::session.store(++all.sessions, std::memory_order_relaxed);
}

void stop_timeline() {
  trace::detail::session.store(0, std::memory_order_relaxed);
}

bool timeline_is_on() noexcept {
  return trace::on();
}

}  // namespace deltasync
