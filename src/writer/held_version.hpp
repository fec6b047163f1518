// What a relay reads of a writer's session, beside what every trainer does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "deltasync/writer.hpp"

namespace deltasync {

/// A whole version in a half of the segment; a tensor's bytes begin at its Tensor::offset.
struct HeldVersion {
  Version version;
  std::span<const std::byte> bytes;
};
/// The version that was committed last to the segment as it is now, by any process, and where it lies; nothing if none
/// was. The bytes stay as they are until a later version is committed. They are not to be read any more after the next
/// begin(), register_plan() or wait_ready(), which may map another segment: ask again then.
std::optional<HeldVersion> held_version(const Writer& writer);

/// A random number of the agent process that the writer connected to last: it tells two agents apart.
std::uint64_t agent_instance(const Writer& writer);

}  // namespace deltasync
