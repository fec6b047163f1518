// Spans for the timeline (timeline.md): what each thread was doing, for which version. Off, a span costs one relaxed
// load. On, it costs two looks at the clock and a store into its thread's own ring, which takes no lock, allocates
// nothing after the thread's first span, and keeps the newest.
//
// Names of spans and arguments are string literals: only their addresses are kept. Hot loops have one span a batch of
// tiles, never one a tile.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/timeline.hpp"
#include "deltasync/version.hpp"

namespace deltasync::trace {

namespace detail {
inline std::atomic<std::uint32_t> session{0};  ///< of start_timeline(); 0: off, as in a child of fork() at first
}

inline bool on() noexcept {
  return detail::session.load(std::memory_order_relaxed) != 0;
}

/// CLOCK_MONOTONIC, which all processes of a machine share.
std::uint64_t now_ns() noexcept;

/// A number, or a literal.
struct Arg {
  template <std::integral T>
  constexpr Arg(const char* n, T v) noexcept : name(n), value(static_cast<std::uint64_t>(v)) {}
  constexpr Arg(const char* n, const char* t) noexcept : name(n), text(t) {}
  const char* name;
  std::uint64_t value = 0;
  const char* text = nullptr;
};
using Args = std::initializer_list<Arg>;

inline constexpr std::size_t kArgsMax = 4;  ///< of a span; more are left out

/// One span as the rings keep it.
struct Event {
  const char* name;
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  VersionId version;
  std::uint32_t track;  ///< 0: the thread's own
  std::uint32_t texts;  ///< bit i: args[i].value is the address of a literal
  struct {
    const char* name;  ///< null: no more
    std::uint64_t value;
  } args[kArgsMax];

  void start(const char* what, const VersionId& of, std::uint32_t on_track, Args with) noexcept;
  void add(const Arg& arg) noexcept;
};
static_assert(sizeof(Event) == 112 && std::is_trivially_copyable_v<Event>);

/// What a thread is in the middle of, for threads that work on its behalf (ThreadPool).
struct Context {
  const char* name = nullptr;  ///< null: nothing is recorded
  VersionId version;
};
/// Of the innermost Span of this thread.
Context context() noexcept;

/// From its construction to its destruction, on one thread. A span without a version has that of the span around it.
class Span {
 public:
  explicit Span(const char* name, Args args = {}) noexcept { begin(name, {}, args); }
  Span(const char* name, const VersionId& version, Args args = {}) noexcept { begin(name, version, args); }
  /// A part of the work that `context` stands for.
  Span(const Context& context, std::uint64_t part) noexcept {
    if (context.name != nullptr) begin(context.name, context.version, {{"part", part}});
  }
  ~Span() {
    if (session_ != 0) end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void set(const Arg& arg) noexcept {
    if (session_ != 0) event_.add(arg);
  }
  /// Where the version is known late.
  void set_version(const VersionId& version) noexcept {
    if (session_ != 0) event_.version = version;
  }
  /// Where calls may be very many and very short: what ends sooner is not recorded.
  void drop_if_shorter(std::uint64_t ns) noexcept { shortest_ns_ = ns; }

 private:
  friend Context context() noexcept;
  friend void note(const Arg& arg) noexcept;

  void begin(const char* name, const VersionId& version, Args args) noexcept {
    session_ = detail::session.load(std::memory_order_relaxed);
    if (session_ != 0) open(name, version, args);
  }
  void open(const char* name, const VersionId& version, Args args) noexcept;
  void end() noexcept;

  std::uint32_t session_ = 0;  // that it began in, and belongs to
  std::uint64_t shortest_ns_ = 0;
  Span* around_;  // set in a session, as the next
  Event event_;
};

/// Adds an argument to the innermost Span of this thread.
void note(const Arg& arg) noexcept;

/// A span that was timed elsewhere, or reaches over several calls.
void record(const char* name, const VersionId& version, std::uint64_t begin_ns, std::uint64_t end_ns,
            Args args = {}) noexcept;

/// A line of the timeline for what belongs to no one thread: a conversation, whose coroutine moves between threads. 0
/// if nothing is recorded.
std::uint32_t add_track(const std::string& name);

/// A span of a track; its spans follow each other or nest. May end on another thread than it began on.
class TrackSpan {
 public:
  TrackSpan(std::uint32_t track, const char* name, const VersionId& version, Args args = {}) noexcept {
    session_ = track != 0 ? detail::session.load(std::memory_order_relaxed) : 0;
    if (session_ != 0) event_.start(name, version, track, args);
  }
  ~TrackSpan() {
    if (session_ != 0) end();
  }
  TrackSpan(const TrackSpan&) = delete;
  TrackSpan& operator=(const TrackSpan&) = delete;
  void set(const Arg& arg) noexcept {
    if (session_ != 0) event_.add(arg);
  }
  void set_version(const VersionId& version) noexcept {
    if (session_ != 0) event_.version = version;
  }

 private:
  void end() noexcept;

  std::uint32_t session_;
  Event event_;
};

/// The label of a version, for who reads the timeline. The newest of some hundred are kept.
void name_version(const Version& version);

// ---- clocks --------------------------------------------------------------------------------------------------

/// Who shares our CLOCK_MONOTONIC has the same one: a digest of the boot and of the time namespace. Random where /proc
/// does not tell.
const Digest128& clock_id();

/// One look at another machine's clock: it was `theirs_ns` there at some moment between two of ours.
struct ClockSample {
  Digest128 clock;
  std::uint64_t sent_ns = 0;
  std::uint64_t received_ns = 0;
  std::uint64_t theirs_ns = 0;
};
/// Nothing for our own clock.
void add_clock_sample(const ClockSample& sample);

// ---- what was recorded ---------------------------------------------------------------------------------------

struct ThreadRecord {
  std::int32_t tid = 0;
  std::string name;
  std::uint64_t dropped = 0;  ///< spans that newer ones took the place of
  std::vector<Event> events;  ///< oldest first, by their end
};
struct Record {
  bool started = false;  ///< ever, in this process
  std::string process;
  std::vector<ThreadRecord> threads;
  std::vector<std::pair<std::uint32_t, std::string>> tracks;
  std::vector<Version> versions;    ///< with labels
  std::vector<ClockSample> clocks;  ///< oldest first
  std::uint64_t lost = 0;           ///< spans of threads that ended long ago, or had no memory for a ring
};
/// While others go on recording: every span in it is whole.
Record snapshot();

/// The file of timeline.md.
std::string to_json(const Record& record);

}  // namespace deltasync::trace
