// Names with places for numbers: `decoder.layers.{L}.mlp.linear_fc2.weight`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"
#include "export/expression.hpp"

namespace deltasync::exporting {

/// What the places of a pattern have in a name.
using Captures = std::map<std::string, std::uint64_t, std::less<>>;

/// Whether `name` is what the pattern says: `{X}` is a number in digits, `*` anything, all else itself. A place that is
/// named twice has the same number both times. Nothing if not.
///   - Errc::invalid_argument: a brace without its other one, or more than two `*`.
Result<std::optional<Captures>> match_name(std::string_view pattern, std::string_view name);

/// Whether `name` begins as the pattern says; what follows goes to `rest`.
///   - Errc::invalid_argument: as match_name().
Result<std::optional<Captures>> match_prefix(std::string_view pattern, std::string_view name, std::string_view& rest);

/// The name with the value of an expression in each place: `model.layers.{num_hidden_layers + M}.enorm.weight`.
///   - Errc::invalid_argument, as evaluate_size().
Result<std::string> expand_name(std::string_view pattern, const Names& names);

}  // namespace deltasync::exporting
