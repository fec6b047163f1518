// Names of files inside a model directory, as they come from indexes and from peers.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"

namespace deltasync {

inline constexpr std::size_t kFileNameBytesMax = 1024;

/// invalid_argument unless the name is a relative path of ordinary components: none empty, none that begins with '.'
/// (so no "..", nothing hidden, nothing that a target keeps for itself), plain text without '\', not too long.
Status check_file_name(std::string_view name);

/// Checks each name, that none occurs twice, and that none is a directory of another.
Status check_file_names(std::span<const std::string_view> names);

}  // namespace deltasync
