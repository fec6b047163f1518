// Who pulls from this agent, and where one more is sent when it has as many as it may (`--children-max`): to the agents
// of relays that pull from here. A relay takes the place of a receiver, which is sent on: so that a tree comes about
// no matter who came first. Who has been silent for long keeps its place only until somebody else asks. Thread-safe.
// Pure: no socket, no clock.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace deltasync::agent {

class Children {
 public:
  using Clock = std::chrono::steady_clock;

  /// At most so many have a place; 0: any number. `silence`: a live child asks something more often.
  explicit Children(std::size_t max, Clock::duration silence = Clock::duration::max()) : max_(max), silence_(silence) {}

  /// Where to ask in place of here; nothing: here is its place.
  struct Elsewhere {
    std::vector<std::string> endpoints;  ///< who was sent the fewest first; empty: nobody is known
  };
  /// This connection asks for a plan. `can_follow`: it knows what `elsewhere` is.
  std::optional<Elsewhere> ask(std::uint64_t connection, bool can_follow, Clock::time_point now = Clock::now());
  /// One that has its place is to give it up now, for a relay.
  bool must_go(std::uint64_t connection, Clock::time_point now = Clock::now()) const;
  /// A request of this connection, or one for tiles of its plan, has come.
  void heard(std::uint64_t connection, Clock::time_point now = Clock::now());

  /// It is the connection of this receiver, whose place it takes over from the one before.
  void is(std::uint64_t connection, std::uint64_t receiver);
  /// It is a relay's: others may pull from its own agent at `endpoint` (empty: that is not known).
  void relays(std::uint64_t connection, std::uint64_t instance, std::string endpoint);
  /// Whether it has committed a version, and all is well with it: then a relay's agent can serve others.
  void stands(std::uint64_t connection, bool well);
  void left(std::uint64_t connection);

  std::size_t max() const noexcept { return max_; }
  std::size_t count() const;
  /// Of relays that others are sent to.
  std::vector<std::string> endpoints(Clock::time_point now = Clock::now()) const;

 private:
  struct Child {
    std::uint64_t receiver = 0;  ///< 0: not said
    bool has_place = false;
    bool can_follow = false;
    bool stands_well = false;
    std::uint64_t instance = 0;  ///< of a relay's own agent
    std::string endpoint;        ///< of that; empty: no relay that others may be sent to
    std::uint64_t sent = 0;      ///< of others, to it
    Clock::time_point heard_at;  ///< once it has asked
  };
  bool is_silent(const Child& child, Clock::time_point now) const { return now - child.heard_at > silence_; }
  bool takes_others(const Child& child, Clock::time_point now) const;
  std::vector<Child*> takers_locked(std::uint64_t besides_instance, Clock::time_point now);
  bool must_go_locked(std::uint64_t connection, Clock::time_point now) const;
  std::size_t count_locked() const;

  const std::size_t max_;
  const Clock::duration silence_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Child> children_;  // protected by mutex_; by connection
};

}  // namespace deltasync::agent
