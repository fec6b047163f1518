// The beginning of a container, for who writes one straight from a delta's frames.
#pragma once

#include <vector>

#include "delta/delta.hpp"

namespace deltasync::delta {

/// What to_container() begins with: the frames follow, one after the other.
std::vector<std::byte> container_header(const Delta& delta);

}  // namespace deltasync::delta
