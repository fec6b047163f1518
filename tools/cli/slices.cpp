// NAME[ROWS][COLUMNS], as `pull --tensor` takes it: each of the two is FIRST:END, either side of it may be missing.
#include <charconv>

#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

Error bad_slice(const std::string& text) {
  return {Errc::invalid_argument, "'" + text + "' is no slice; write NAME, NAME[FIRST:END] or NAME[ROWS][COLUMNS]"};
}

/// Takes "[FIRST:END]" off the front of `rest`; a missing side is 0 or `length`.
bool take_range(std::string_view& rest, std::uint64_t length, std::uint64_t& first, std::uint64_t& end) {
  const std::size_t close = rest.find(']');
  if (!rest.starts_with('[') || close == std::string_view::npos) return false;
  const std::string_view range = rest.substr(1, close - 1);
  rest.remove_prefix(close + 1);
  const std::size_t colon = range.find(':');
  if (colon == std::string_view::npos) return false;
  const auto number = [](std::string_view digits, std::uint64_t otherwise, std::uint64_t& value) {
    value = otherwise;
    if (digits.empty()) return true;
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size();
  };
  return number(range.substr(0, colon), 0, first) && number(range.substr(colon + 1), length, end) && first <= end;
}

}  // namespace

Result<Slice> parse_slice(const Layout& layout, const std::string& text) {
  const std::size_t bracket = text.find('[');
  Slice slice{text.substr(0, bracket), std::nullopt};
  if (bracket == std::string::npos) return slice;
  const auto index = layout.find(slice.tensor);
  if (!index) return Error(Errc::not_found, "the layout has no tensor '" + slice.tensor + "'");
  const Tensor& tensor = layout.tensors()[*index];
  std::string_view rest = std::string_view(text).substr(bracket);
  std::uint64_t row_end = tensor.rows;
  std::uint64_t col_end = tensor.cols;
  Rect rect;
  if (!take_range(rest, tensor.rows, rect.row, row_end)) return bad_slice(text);
  if (!rest.empty() && !take_range(rest, tensor.cols, rect.col, col_end)) return bad_slice(text);
  if (!rest.empty()) return bad_slice(text);
  rect.rows = row_end - rect.row;
  rect.cols = col_end - rect.col;
  slice.rect = rect;
  return slice;
}

}  // namespace deltasync::cli
