// What a relay does with a writer's session beside what every trainer does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "deltasync/result.hpp"
#include "deltasync/writer.hpp"
#include "format/wire_report.hpp"

namespace deltasync {

/// One fill of a half. The sequence grows with every fill of the segment, by whichever process: one more than the last
/// means that nothing was written in between.
struct FillOfHalf {
  unsigned half = 0;
  std::uint64_t sequence = 0;
};
/// A whole version in a half of the segment; a tensor's bytes begin at its Tensor::offset.
struct HeldVersion {
  Version version;
  std::span<const std::byte> bytes;
  FillOfHalf fill;
};
/// The version that was committed last to the segment as it is now, by any process, and where it lies; nothing if none
/// was. The bytes stay as they are until a later version is committed. They are not to be read any more after the next
/// begin(), register_plan() or wait_ready(), which may map another segment: ask again then.
std::optional<HeldVersion> held_version(const Writer& writer);

/// Versions have the names that their trainers gave them: begin() takes any label that the formats have.
void take_labels_of_trainers(Writer& writer);

/// The one that is open; nothing if none is.
std::optional<FillOfHalf> open_fill(const Writer& writer);

/// Lets `change` write to the half that is being filled, as it is: with what the version before the last one left
/// there, if nothing was written since. The fill counts as whole then: what `change` leaves is the version. May be
/// called more than once; an abort waits for the end of a call. An error of `change`, or `aborted`, makes the fill one
/// that only abort() ends.
Status change_fill(Writer& writer, const std::function<Status(std::span<std::byte> half)>& change);

/// Hands a delta over with the version that is being filled, in the form of shm_protocol.md "Kept deltas": before the
/// seal. no_space, io: it is not, and the agent compares the halves.
Status hand_over_delta(const Writer& writer, std::span<const ByteSpan> pieces);
/// The version comes to nothing.
void withdraw_delta(const Writer& writer) noexcept;

/// What comes to the relay, and the memory where; an agent that is started again hears it too. Best effort.
void tell_arrival(Writer& writer, const wire::TrainerArrival& arrival, int memory);
/// None comes any more. Not told where the agent hears so by the version itself.
void end_arrival(Writer& writer, bool tell) noexcept;
/// The delta that comes to the relay, and its parts in any order; no version: none comes any more. An error: the agent
/// does not hear it, and what follows of this delta is of no use to it.
Status tell_delta(Writer& writer, const wire::TrainerDelta& delta);
Status tell_frames(Writer& writer, const wire::TrainerFrames& frames, Deadline deadline);
/// While no fill is open: connects if the agent was started again, which takes a moment at most.
void look_for_agent(Writer& writer);

/// A random number of the agent process that the writer connected to last: it tells two agents apart.
std::uint64_t agent_instance(const Writer& writer);
/// Tells it where the versions come from, and the one that takes its place. Best effort, for a moment at most.
void tell_parents(Writer& writer, wire::Parents parents);

}  // namespace deltasync
