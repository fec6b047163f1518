// The small expressions of family pages: numbers, names of sizes and of config.json's keys, + - * /, comparisons,
// `and`, `or`, `not`, parentheses. `a | b` is b where a is not there. Truth is a number: 0 is false.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"

namespace deltasync::exporting {

/// The value of a name; nothing: there is none of this name. Errors are passed on.
using Names = std::function<Result<std::optional<double>>(const std::string& name)>;

/// Nothing: it depends on a name that is not there, which `missing` is set to if it is given.
///   - Errc::invalid_argument: no expression, or a division by zero; the message shows where.
Result<std::optional<double>> evaluate(std::string_view expression, const Names& names, std::string* missing = nullptr);

/// A whole number of at least 0.
///   - Errc::invalid_argument: a name that is not there, a fraction, or no expression.
Result<std::uint64_t> evaluate_size(std::string_view expression, const Names& names);

}  // namespace deltasync::exporting
