// The control conversation: layout, plans, digests, releases. Connects again by itself; a plan dies with the
// connection that asked for it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "base/fork_guard.hpp"
#include "base/log_limit.hpp"
#include "deltasync/result.hpp"
#include "format/wire.hpp"
#include "format/wire_local.hpp"
#include "format/wire_report.hpp"
#include "receiver/connection.hpp"
#include "receiver/peer.hpp"

namespace deltasync::receiver {

/// How a question to the agent ended.
template <class T>
struct Answer {
  std::optional<T> value;
  std::optional<Error> refused;                   ///< the agent's own words; the connection is fine
  std::optional<Error> broken;                    ///< no answer; the connection is closed
  std::optional<wire::Elsewhere> elsewhere = {};  ///< of a plan: the agent has no place, and names others
};

class Control {
 public:
  /// `standing`: what is told to the agent first, on each new connection.
  Control(const Peer& peer, wire::Report standing)
      : peer_(peer),
        standing_(std::move(standing)),
        silent_at_(peer.addresses->size()),
        preferred_wait_(peer.tuning.preferred_look) {}

  /// While it lives, a stop ends whatever the conversation waits for, with `cancelled`.
  class [[nodiscard]] StopScope {
   public:
    StopScope(Control& control, const std::stop_token& stop) : control_(control) { control_.stop_on(stop); }
    ~StopScope() { control_.stop_on({}); }
    StopScope(const StopScope&) = delete;
    StopScope& operator=(const StopScope&) = delete;

   private:
    Control& control_;
  };
  StopScope stop_by(const std::stop_token& stop) { return {*this, stop}; }

  /// One attempt.
  Status connect(Deadline deadline);
  /// Connected, after as many attempts as the deadline allows. `cancelled` at once; `unauthenticated` and `unsupported`
  /// too, if no other agent is there. Logs when the agent goes away, and when it is back.
  Status ensure(Deadline deadline);
  void drop();
  /// The agent has fallen silent on another connection of this receiver: as if it had here.
  void lost(const Error& why);
  /// The agent in use shall not be: others are asked before it for a while.
  void pass_over(const Error& why);
  /// The agent in use says that nobody brings newer versions there: goes on at another one that has a later version
  /// than `held`, or, if that is held in part, has it. False: none has, and the one in use stays that.
  bool leave_cut_off(const Error& said, const VersionId& held, bool in_part, Deadline deadline);
  /// Something newer than what is held has come.
  void note_news() noexcept { news_at_ = Clock::now(); }
  /// Nothing has for a while, though the agent in use is there: it may never, where a relay hangs, say. Goes on at
  /// another one that has such a version. False: none has, or it is not yet time to ask.
  bool leave_behind(const VersionId& held, bool in_part, Deadline deadline);
  /// The agent in use serves an older epoch than `held`: goes on at another one that has that version or a later one.
  /// False: none has.
  bool leave_older(const VersionId& held, Deadline deadline);
  /// To the log, now and then: why nothing comes for a while.
  void say_busy(const Error& said, std::chrono::milliseconds pause);
  /// Before a pull a new connection takes the place of the one that there is, where that is of use: to the preferred
  /// agent, if another one is in use and it was not tried for a while; and, while a timeline is recorded, to look at
  /// the agent's clock, since clocks drift. If none comes about soon, the old one goes on.
  void look_around(Deadline deadline);

  std::uint64_t instance() const noexcept { return connection_.instance(); }
  const wire::Welcome& welcome() const noexcept { return connection_.welcome(); }
  std::uint16_t protocol() const noexcept { return connection_.protocol(); }
  bool same_host() const { return connection_.same_host(); }

  Answer<wire::LayoutMessage> layout(Deadline deadline);
  /// Names the tiles of the plans that this connection will ask for, and their digest.
  Answer<wire::Empty> subscribe(const wire::Subscribe& tiles, const Digest128& digest, Deadline deadline);
  /// What this connection has subscribed to; zero: nothing.
  const Digest128& subscription() const noexcept { return subscription_; }
  /// The agent may take `plan.wait_ms` before it answers.
  Answer<wire::PlanReply> plan(const wire::PlanRequest& plan, Deadline deadline);
  /// Exactly `tiles` digests (of the plan's, in order) whose root is `root`.
  Answer<std::vector<std::uint64_t>> digests(std::uint64_t plan, std::uint64_t tiles, const Digest128& root,
                                             Deadline deadline);
  /// About tiles of an open plan; only an agent of protocol 5 knows the question.
  Answer<wire::TilesChecked> check_tiles(const wire::CheckTiles& question, Deadline deadline);
  /// Where the agent has its versions from; `own`: the agent that this relay writes to. invalid_argument: a cycle.
  /// Only an agent of protocol 5 knows the question.
  Answer<wire::Parents> parents(const wire::RelayTo& own, Deadline deadline);
  /// Connects to the first of these that is there, has this layout and is none of `asked`, to which the one in use is
  /// added. connection: there is none, and the one in use stays that.
  Status follow(const wire::Elsewhere& named, const Digest128& layout, std::set<std::uint64_t>& asked,
                Deadline deadline);
  /// Where the bytes of a full plan lie on the agent's host. Only an agent of protocol 5 knows the question.
  Answer<wire::Local> local(std::uint64_t plan, Deadline deadline);
  /// They have not been asked for on this connection, or not for a while: the agent may pull from another one by now.
  bool parents_are_due() const { return Clock::now() - parents_asked_at_ > peer_.tuning.parents_look; }
  /// Tells the agent how this receiver stands: now if there is a connection, in any case on the next one. Takes a
  /// moment.
  void report(wire::Report standing);
  /// The receiver ends: the agent shall not take it for lost. Over a new connection, if the one that there was has
  /// ended (a stop shuts it down, a call that ran out of time too). Best effort, a second at most; nothing in a forked
  /// child, whose parent goes on.
  void say_goodbye();
  /// Best effort: if no answer comes the connection is closed, which frees the plan as well.
  void release(std::uint64_t plan, Deadline deadline);

  std::uint64_t bytes_received() const noexcept { return closed_bytes_ + connection_.bytes_received(); }
  /// Since an agent has answered last, or the receiver was made.
  std::chrono::nanoseconds unheard() const { return Clock::now() - heard_at_; }
  /// The last trouble with the connection, for the message of a deadline.
  const std::optional<Error>& noted() const noexcept { return noted_; }

 private:
  using Clock = std::chrono::steady_clock;

  void stop_on(const std::stop_token& stop);
  void leave();
  Status connect_once(Connection& connection, std::chrono::milliseconds patience, Deadline deadline);
  Status connect(std::chrono::milliseconds patience, Deadline deadline);

  // which agent (control_agents.cpp)
  bool replace(Deadline deadline, const std::function<bool(Connection&)>& is_wanted = {});
  bool go_where_later(const VersionId& held, bool in_part, Deadline deadline);
  void note_silent();
  std::vector<std::size_t> in_order() const;
  void try_preferred(Deadline deadline);
  void wait_longer();

  void tell_standing();
  /// The header of the answer to `request`; an `error` message ends up in `answer`.
  template <class T>
  std::optional<wire::Header> answer_header(Answer<T>& answer, wire::Type type, std::uint64_t request,
                                            Deadline header_deadline, Deadline deadline);
  template <class T>
  Answer<T> give_up(const Error& error);
  template <class M, class Question>
  Answer<M> ask(const Question& question, std::chrono::milliseconds patience, Deadline deadline);

  const ForkGuard fork_guard_;
  const Peer& peer_;
  Connection connection_;
  std::uint64_t clock_seen_ns_ = 0;  ///< at the last handshake
  std::stop_token stop_;
  Digest128 subscription_;
  wire::Report standing_;
  bool told_ = false;  ///< on this connection
  bool cut_ = false;   ///< a connection on which that was ended, and there has been none since
  std::uint64_t closed_bytes_ = 0;
  std::optional<Error> noted_;
  bool turned_away_ = false;                   ///< by the last attempt
  bool away_ = false;                          ///< that was said
  std::vector<Clock::time_point> silent_at_;   ///< when each address was found silent last
  Clock::time_point heard_at_ = Clock::now();  ///< when an agent has answered last
  Clock::time_point news_at_ = Clock::now();   ///< when something newer came last, or the others were asked for it
  Clock::time_point preferred_tried_at_;
  Clock::time_point parents_asked_at_;
  log::LineLimit cycle_lines_{1, std::chrono::seconds(30)};
  log::LineLimit cut_off_lines_{1, std::chrono::seconds(30)};
  Clock::time_point preferred_back_at_;
  std::chrono::milliseconds preferred_wait_{0};  ///< until it is tried again
  log::LineLimit busy_lines_{1, std::chrono::seconds(30)};
};

}  // namespace deltasync::receiver
