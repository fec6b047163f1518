// Work that shares links and processors. All work that goes on at a time gets max-min fair rates, until some of it
// begins or ends: then those that share anything with it get new ones. Pure and deterministic: time is a number.
#pragma once

#include <cstdint>
#include <limits>
#include <queue>
#include <span>
#include <utility>
#include <vector>

namespace deltasync::capacity {

/// Numbers from 0 on, in the order in which they were added.
using ResourceId = std::uint32_t;
using WorkId = std::uint32_t;

inline constexpr double kUnlimited = std::numeric_limits<double>::infinity();
inline constexpr ResourceId kNobody = std::numeric_limits<ResourceId>::max();

struct Use {
  ResourceId resource = 0;
  double each = 0;  ///< units of the resource that a unit of the work takes
};

struct Work {
  double amount = 0;        ///< 0: it is over when its delay is
  double delay_s = 0;       ///< from the end of all that it waits for until it begins
  std::vector<Use> uses;    ///< without any it takes no time
  double weight = 1;        ///< > 0: its share, where several want one resource
  std::uint32_t stage = 0;  ///< the caller's
};

/// Seconds on the way to the end of some work.
struct PathPart {
  std::uint32_t stage = 0;
  ResourceId limit = kNobody;  ///< the resource that allowed no more; kNobody: a delay
  double seconds = 0;
};

class Fluid {
 public:
  /// `per_s` > 0: units a second.
  ResourceId add_resource(double per_s);
  /// It waits for the end of all of `after`, which were added before.
  WorkId add(Work work, std::span<const WorkId> after = {});
  /// All work, from 0 s to its end. Once.
  void run();
  /// After run().
  double end_s(WorkId work) const { return items_[work].end_s; }
  /// What `work` waited for, and went through itself; parts of a stage with one limit are one. Latest first. Their sum
  /// is end_s(work).
  std::vector<PathPart> path_to(WorkId work) const;

 private:
  enum class State : std::uint8_t { waiting, delayed, active, ended };
  struct Item {
    Work work;
    std::vector<WorkId> then;
    std::uint32_t waits_for = 0;
    State state = State::waiting;
    WorkId released_by = kNobody;  ///< what it waited for last
    double left = 0;
    double rate = 0;
    double since_s = 0;  ///< when `left` was so much
    double end_s = 0;
    ResourceId limit = kNobody;
    std::uint32_t round = 0;  ///< of its rate: later than an event's own, that event is void
    std::uint64_t seen = 0;   ///< the turn in which it was last given a rate
    std::vector<std::pair<ResourceId, double>> limited;
  };
  struct Resource {
    double per_s = 0;
    std::vector<WorkId> active;
    double free = 0;  // these three: while rates are made
    double wanted = 0;
    std::uint32_t users = 0;
    std::uint64_t seen = 0;
    bool touched = false;
  };
  struct Event {
    double at_s;
    WorkId work;
    std::uint32_t round;
    bool operator>(const Event& other) const { return at_s != other.at_s ? at_s > other.at_s : work > other.work; }
  };

  void release(WorkId work, double now_s);
  void start(WorkId work, double now_s);
  void finish(WorkId work, double now_s);
  void touch(ResourceId resource);
  void account(Item& item, double now_s);
  void make_rates(double now_s);
  void collect_touched();
  void fill();
  void freeze(WorkId work, ResourceId limit, double level);

  std::vector<Item> items_;
  std::vector<Resource> resources_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<ResourceId> touched_;  ///< by what began or ended since rates were made
  std::vector<WorkId> open_;         ///< of what was touched: work whose rate is not known yet
  std::vector<ResourceId> open_resources_;
  std::uint64_t turn_ = 0;
};

}  // namespace deltasync::capacity
