// A rank's target that is nothing but the names of versions, and keeps those without a mistake: what the tests of the
// machines, and the model of all their interleavings, have in place of receiver and memory.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "commit/participant_machine.hpp"

namespace deltasync::commit {

inline Version version(std::uint64_t number) {
  return {{1, number}, "step_" + std::to_string(number)};
}

struct PretendTarget {
  VersionId holds;
  std::optional<VersionId> staged;
  std::optional<VersionId> undo;  ///< what roll_back restores
  bool broken = false;            ///< it was asked for what cannot be done

  /// Its process dies: what is staged and the undo log die with it, and the version too unless a directory has it.
  void die(bool keeps) {
    if (!keeps) holds = {};
    staged.reset();
    undo.reset();
  }

  /// Does what the machine asks for, or fails with `error`. `newest` is what a pull brings that names no version.
  WorkResult work(const Work& work, const Version& newest, std::optional<Error> error = {}) {
    WorkResult result;
    const bool fails = error.has_value();
    result.error = std::move(error);
    switch (work.kind) {
      case Work::Kind::none:
      case Work::Kind::pause: break;
      case Work::Kind::pull:
        staged.reset();
        undo.reset();
        if (fails) break;
        result.staged = work.exact.valid() ? version(work.exact.number) : newest;
        staged = result.staged.id;
        break;
      case Work::Kind::commit:
        broken = broken || !staged;
        if (!fails) undo = std::exchange(holds, staged.value_or(VersionId()));
        staged.reset();
        break;
      case Work::Kind::roll_back:
        if (!fails && undo) holds = *undo;
        undo.reset();
        staged.reset();
        break;
      case Work::Kind::catch_up:
        if (!fails) holds = work.exact;
        break;
      case Work::Kind::forget:
        staged.reset();
        undo.reset();
        break;
    }
    result.holds = holds;
    return result;
  }
};

}  // namespace deltasync::commit
