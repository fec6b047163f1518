// Whether the plans of all writers of a job fit together. No I/O, no clock, and not the check itself, which takes long
// for a large model: the trainer server feeds the board, runs the trials that it asks for, and asks for outcomes.
//
// A plan is *fresh* from submit() until it was accepted. All slots must have a plan, fresh or accepted before, for a
// trial to be made. So a writer that was restarted alone is checked against the plans that the others registered
// long ago; and if it does not fit those, that is no verdict yet, since the others may be about to register again.
// After an agent's restart the others bring those plans again (restore()) when they connect.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deltasync/result.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::agent {

class WriterPlanBoard {
 public:
  using WriterPlan = std::shared_ptr<const std::vector<TensorSlice>>;

  /// The plans of all writers at one moment. They fit if their slices are disjoint and cover the layout.
  struct Trial {
    std::uint64_t state = 0;  ///< of the board
    std::vector<WriterPlan> plans;
  };

  /// Registers a writer's plan, in place of the one that it had. A trial may be due.
  void submit(std::uint32_t slot, std::uint32_t writers, WriterPlan plan);
  /// The same of one that an agent before has accepted: nothing to be judged, but others may be waiting for it.
  void restore(std::uint32_t slot, std::uint32_t writers, WriterPlan plan);
  /// The trial that is due, once; one at a time, to be ended by conclude() or fail().
  std::optional<Trial> next_trial();
  /// What came out of it. May settle the outcome of every waiting writer; nothing if a plan came or went meanwhile, and
  /// then another trial may be due.
  void conclude(const Trial& trial, const Status& fits);
  /// The trial could not be made: all who wait for it are told.
  void fail(const Trial& trial, const Error& why);

  /// The verdict on this slot's fresh plan, once; nothing while it is still open.
  std::optional<Status> take_outcome(std::uint32_t slot);
  /// The writer stopped waiting: its fresh plan is dropped. Says what was missing.
  Error give_up(std::uint32_t slot);
  /// The writer left or died (`who` for the message): its plan is dropped, and those who wait for it are told.
  void remove(std::uint32_t slot, const Error& why);
  bool accepted(std::uint32_t slot) const;
  bool waiting(std::uint32_t slot) const;
  /// Of slots 0 … writers−1, those that have no plan, but for `slot`: "1, 2".
  std::string missing_besides(std::uint32_t slot, std::uint32_t writers) const;

 private:
  struct Entry {
    WriterPlan plan;
    bool fresh = true;
    std::optional<Status> outcome;
  };
  void put(std::uint32_t slot, std::uint32_t writers, WriterPlan plan, bool fresh);
  void tell_waiting(const Error& why);

  std::uint32_t writers_ = 0;
  std::map<std::uint32_t, Entry> entries_;
  std::uint64_t state_ = 1;  ///< grows whenever a plan comes or goes
  std::uint64_t tried_ = 0;  ///< the state of the last trial
  bool trying_ = false;
  std::string last_misfit_;  ///< why the last trial against older plans failed
};

}  // namespace deltasync::agent
