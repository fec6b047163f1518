// Whether the plans of all writers of a job fit together. No I/O and no clock: the trainer server feeds it and asks.
//
// A plan is *fresh* from submit() until it was accepted. All slots must have a plan, fresh or accepted before, for a
// check to be made. So a writer that was restarted alone is checked against the plans that the others registered
// long ago; and if it does not fit those, that is no verdict yet, since the others may be about to register anew.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deltasync/result.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::agent {

class PlanBoard {
 public:
  /// Ok if the slices are disjoint and cover the layout.
  using Check = std::function<Status(std::span<const TensorSlice>)>;
  explicit PlanBoard(Check check) : check_(std::move(check)) {}

  /// Registers a writer's plan, in place of the one that it had. May settle the outcome of every waiting writer.
  void submit(std::uint32_t slot, std::uint32_t writers, std::vector<TensorSlice> plan);
  /// The verdict on this slot's fresh plan, once; nothing while it is still open.
  std::optional<Status> take_outcome(std::uint32_t slot);
  /// The writer stopped waiting: its fresh plan is dropped. Says what was missing.
  Error give_up(std::uint32_t slot);
  /// The writer left or died (`who` for the message): its plan is dropped, and those who wait for it are told.
  void remove(std::uint32_t slot, const Error& why);
  bool accepted(std::uint32_t slot) const;
  bool waiting(std::uint32_t slot) const;

 private:
  struct Entry {
    std::vector<TensorSlice> plan;
    bool fresh = true;
    std::optional<Status> outcome;
  };
  void settle();
  std::string missing() const;

  Check check_;
  std::uint32_t writers_ = 0;
  std::map<std::uint32_t, Entry> entries_;
  std::string last_misfit_;  ///< why the last check against older plans failed
};

}  // namespace deltasync::agent
