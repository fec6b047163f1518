// One round of a pull: a list of work items that several streams share until all of it has arrived, or until going on
// makes no sense (lease revoked, agent restarted, deadline, a stop that the caller asked for). Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <stop_token>
#include <vector>

#include "base/call_context.hpp"
#include "deltasync/result.hpp"
#include "format/wire.hpp"

namespace deltasync::receiver {

/// What one request asks for. `ranges` shrinks as parts of the reply arrive and are verified, so that a broken stream
/// leaves behind exactly what is still missing.
struct Item {
  std::uint32_t step = 0;  ///< delta step, for frames
  std::vector<wire::TileRange> ranges;
  std::uint32_t bad_content = 0;  ///< times that its bytes arrived whole and were wrong
};

enum class FetchRoundEnd : std::uint8_t {
  complete,     ///< every item arrived
  replan,       ///< the agent refused, or is another process now: make a new plan
  busy,         ///< the agent had no place for any stream: make a new plan in a while
  bad_content,  ///< well-transported bytes that do not fit what we hold, twice
  failed,       ///< the pull cannot go on
};

struct FetchRoundResult {
  FetchRoundEnd end = FetchRoundEnd::complete;
  std::optional<Error> error;  ///< why, unless complete
  std::optional<Error> noted;  ///< the last trouble on a stream, for the message of a deadline
  std::uint32_t stream_restarts = 0;
  std::string transports;   ///< as PullReport's
  std::uint64_t bytes = 0;  ///< received
  double waited_s = 0;      ///< for bytes that were due, the mean over the streams

  /// Some bytes came again and again and were never what they had to be: other bytes may do.
  bool bytes_never_fit() const {
    if (end == FetchRoundEnd::bad_content) return true;
    return end == FetchRoundEnd::failed && (error->code() == Errc::corrupt || error->code() == Errc::protocol);
  }
};

class FetchRound {
 public:
  /// `streams` take part in it.
  FetchRound(std::vector<Item> items, const CallContext& until, std::size_t streams);

  Deadline deadline() const noexcept { return until_.deadline(); }
  /// Requested when the round ends early, for whatever reason: sockets that wait on behalf of the round stop on it.
  std::stop_token stop() const noexcept { return stop_.get_token(); }

  /// The next item. Waits while others may still give theirs back; nothing once the round is over.
  std::optional<Item> take();
  /// Another item to ask for ahead of its turn: only while there is more than enough for every stream. Past the
  /// deadline it ends the round, as take() does.
  std::optional<Item> take_ahead(std::size_t streams);
  /// A taken item has arrived whole.
  void done();
  /// A taken item goes back; one without ranges counts as done.
  void give_back(Item item);

  /// Ends the round; the first caller's reason stays.
  void finish(FetchRoundEnd end, Error error);
  bool over() const;
  /// A stream broke and starts again.
  void restarted(const Error& why);
  /// A stream takes part no more: the agent has no place for it. The others go on; with the last one the round ends.
  void left(const Error& why);
  /// Sleeps, but not past the end of the round or its deadline.
  void pause(std::chrono::milliseconds time);

  FetchRoundResult result() const;

 private:
  void finish_locked(FetchRoundEnd end, Error error);

  struct OnStop {
    FetchRound* round;
    void operator()() const;
  };

  const CallContext until_;
  std::stop_source stop_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;      // protected by mutex_, as all below
  std::size_t unfinished_ = 0;  // queued or taken
  std::size_t streams_ = 0;     // that take part
  bool over_ = false;
  FetchRoundResult result_;
  std::stop_callback<OnStop> on_stop_;  // last: it may run while this is constructed
};

}  // namespace deltasync::receiver
