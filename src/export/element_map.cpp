#include "export/element_map.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "deltasync/layout.hpp"

namespace deltasync::exporting {
namespace {

constexpr std::size_t kTextMax = 4096;
constexpr std::size_t kDimsMax = 16;

Error wrong(std::string_view text, const std::string& what) {
  return {Errc::invalid_argument, "'" + std::string(text) + "': " + what};
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> pieces;
  for (;;) {
    const std::size_t end = text.find(at);
    pieces.push_back(trimmed(text.substr(0, end)));
    if (end == std::string_view::npos) return pieces;
    text.remove_prefix(end + 1);
  }
}

/// The dimensions of one side of a view, each a list of what is in it.
Result<std::vector<std::vector<std::string>>> dimensions(std::string_view view, std::string_view side) {
  std::vector<std::vector<std::string>> dims;
  bool inside = false;
  std::string word;
  const auto end_word = [&] {
    if (word.empty()) return;
    if (!inside) dims.emplace_back();
    dims.back().push_back(std::exchange(word, {}));
  };
  for (const char c : side) {
    if (c == ' ') {
      end_word();
    } else if (c == '(') {
      if (inside || !word.empty()) return wrong(view, "a '(' in the wrong place");
      dims.emplace_back();
      inside = true;
    } else if (c == ')') {
      if (!inside) return wrong(view, "a ')' without its '('");
      end_word();
      inside = false;
    } else {
      word += c;
    }
  }
  if (inside) return wrong(view, "a '(' without its ')'");
  end_word();
  if (dims.size() > kDimsMax) return wrong(view, "too many dimensions");
  return dims;
}

/// An axis of a part by its name: one, or two where a block's border cuts it.
using NamedAxes = std::map<std::string, std::vector<Axis>, std::less<>>;

/// The axes of one dimension, the innermost last; of dimension 0 their strides are still those within the part.
Status add_dimension(std::string_view view, const std::vector<std::string>& words, unsigned dim, std::uint64_t size,
                     const Names& names, NamedAxes& out) {
  std::vector<std::pair<std::string, std::optional<std::uint64_t>>> atoms;
  std::uint64_t known = 1;
  std::size_t unknown = 0;
  for (const std::string& word : words) {
    const std::size_t colon = word.find(':');
    std::optional<std::uint64_t> extent;
    if (colon != std::string::npos) {
      DS_ASSIGN(extent, evaluate_size(std::string_view(word).substr(colon + 1), names));
      if (*extent == 0 || known > size / *extent) return wrong(view, word + " does not divide " + std::to_string(size));
      known *= *extent;
    } else {
      ++unknown;
    }
    atoms.emplace_back(word.substr(0, colon), extent);
  }
  if (unknown > 1) return wrong(view, "only one size of a dimension may be left out");
  if (unknown == 0 ? known != size : size % known != 0) {
    return wrong(view, "its sizes of dimension " + std::to_string(dim) + " make " + std::to_string(known) +
                           ", and that has " + std::to_string(size));
  }
  std::uint64_t stride = 1;
  for (auto atom = atoms.rbegin(); atom != atoms.rend(); ++atom) {
    const std::uint64_t extent = atom->second.value_or(size / known);
    if (!out.emplace(atom->first, std::vector<Axis>{{extent, dim, stride, 0}}).second) {
      return wrong(view, "'" + atom->first + "' twice");
    }
    stride *= extent;
  }
  return {};
}

/// Dimension 0 of a part goes through blocks: strides that reach over a block are strides of blocks.
Status lay_into_blocks(std::string_view view, const Parts& parts, std::uint64_t size, NamedAxes& named) {
  for (auto& [name, axes] : named) {
    if (axes.front().source_dim != 0) continue;
    const Axis axis = axes.front();
    const std::uint64_t reach = axis.stride_end();
    if (axis.source_stride >= size) {
      axes.front().source_stride = axis.source_stride / size * parts.block;
    } else if (reach > size) {
      if (reach % size != 0 || size % axis.source_stride != 0) {
        return wrong(view, "'" + name + "' goes over the border of a block");
      }
      axes = {{reach / size, 0, parts.block, 0}, {size / axis.source_stride, 0, axis.source_stride, 0}};
    }
  }
  return {};
}

struct Item {
  Axis* axis = nullptr;  ///< nothing: fixed
  FixedAxis fixed;
};

/// `word`: NAME, INDEX/EXTENT, or NAME@INDEX/EXTENT.
Result<std::vector<Item>> items_of(std::string_view view, const std::string& word, NamedAxes& named,
                                   const Names& names) {
  std::vector<Item> items;
  std::uint64_t count = 1;
  const std::size_t slash = word.find('/');
  const std::size_t at = slash == std::string::npos ? std::string::npos : word.find('@');
  if (slash == std::string::npos || at != std::string::npos) {
    const std::string name = word.substr(0, at);
    const auto found = named.find(name);
    if (found == named.end()) return wrong(view, "'" + name + "' is not on its left");
    for (Axis& axis : found->second) {
      if (axis.target_stride != 0) return wrong(view, "'" + name + "' twice on its right");
      axis.target_stride = 1;
      items.push_back({&axis, {}});
      count *= axis.extent;
    }
    if (slash == std::string::npos) return items;
  }
  const std::string_view numbers = std::string_view(word).substr(at == std::string::npos ? 0 : at + 1);
  const std::size_t cut = numbers.find('/');
  DS_ASSIGN(const std::uint64_t index, evaluate_size(numbers.substr(0, cut), names));
  DS_ASSIGN(const std::uint64_t extent, evaluate_size(numbers.substr(cut + 1), names));
  if (count == 0 || count > extent || index > extent - count) {
    return wrong(view,
                 word + ": there are no " + std::to_string(count) + " from number " + std::to_string(index) + " on");
  }
  items.insert(items.begin(), {nullptr, {1, extent, index, count}});
  return items;
}

/// Puts the names of the other dimensions in place of `...`.
void expand_rest(std::vector<std::vector<std::string>>& dims, std::size_t rest) {
  const auto at = std::find(dims.begin(), dims.end(), std::vector<std::string>{"..."});
  if (at == dims.end()) return;
  std::vector<std::vector<std::string>> more;
  for (std::size_t i = 0; i < rest; ++i) more.push_back({"..." + std::to_string(i)});
  const auto place = dims.erase(at);
  dims.insert(place, more.begin(), more.end());
}

}  // namespace

std::uint64_t ElementMap::target_begin() const {
  std::uint64_t begin = 0;
  for (const FixedAxis& axis : fixed) begin += axis.index * axis.stride;
  return begin;
}

Result<Parts> parse_parts(std::string_view text, std::uint64_t rows, const Names& names) {
  text = trimmed(text);
  if (text.empty()) return Parts{1, rows, {{"", 0, rows}}};
  if (text.size() > kTextMax) return wrong(text.substr(0, 32), "too long");
  Parts out;
  const std::size_t open = text.find('[');
  if (open == std::string_view::npos || text.back() != ']') return wrong(text, "'[name: size, …]' is wanted");
  std::string_view repeat = trimmed(text.substr(0, open));
  if (!repeat.empty()) {
    if (repeat.back() != '*') return wrong(text, "'count * [' is wanted");
    repeat = trimmed(repeat.substr(0, repeat.size() - 1));
    DS_ASSIGN(out.repeat, evaluate_size(repeat, names));
    if (out.repeat == 0) return wrong(text, "no block at all");
  }
  const auto entries = split(text.substr(open + 1, text.size() - open - 2), ',');
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::size_t colon = entries[i].find(':');
    if (colon == std::string_view::npos) return wrong(text, "'name: size' is wanted");
    Parts::Part part{std::string(trimmed(entries[i].substr(0, colon))), out.block, 0};
    const std::string_view size = trimmed(entries[i].substr(colon + 1));
    if (size == "*" && i + 1 == entries.size() && rows % out.repeat == 0 && rows / out.repeat >= out.block) {
      part.size = rows / out.repeat - out.block;
    } else {
      DS_ASSIGN(part.size, evaluate_size(size, names));
    }
    if (part.size > rows)
      return wrong(text, part.name + " has " + std::to_string(part.size) + " rows, the tensor " + std::to_string(rows));
    out.block += part.size;
    out.parts.push_back(std::move(part));
  }
  if (out.block == 0 ? rows != 0 : rows % out.block != 0 || rows / out.block != out.repeat) {
    return wrong(text, "makes " + std::to_string(out.repeat) + " * " + std::to_string(out.block) +
                           " rows, and the tensor has " + std::to_string(rows));
  }
  return out;
}

Result<ElementMap> map_part(const Parts& parts, const Parts::Part& part, std::string_view view,
                            std::span<const std::uint64_t> source_shape, const Names& names) {
  if (view.empty()) view = "... -> ...";
  if (view.size() > kTextMax) return wrong(view.substr(0, 32), "too long");
  const std::size_t arrow = view.find("->");
  if (arrow == std::string_view::npos) return wrong(view, "'->' is wanted");
  DS_ASSIGN(auto left, dimensions(view, view.substr(0, arrow)));
  DS_ASSIGN(auto right, dimensions(view, view.substr(arrow + 2)));
  const bool has_rest = std::find(left.begin(), left.end(), std::vector<std::string>{"..."}) != left.end();
  const std::size_t rest =
      has_rest && source_shape.size() + 1 >= left.size() ? source_shape.size() + 1 - left.size() : 0;
  expand_rest(left, rest);
  expand_rest(right, rest);
  if (left.size() != source_shape.size()) {
    return wrong(view, "it has " + std::to_string(left.size()) + " dimensions on its left, and the tensor " +
                           std::to_string(source_shape.size()));
  }

  NamedAxes named;
  for (unsigned dim = 0; dim < left.size(); ++dim) {
    const std::uint64_t size = dim == 0 ? parts.repeat * part.size : source_shape[dim];
    DS_TRY(add_dimension(view, left[dim], dim, size, names, named));
  }
  if (part.size != 0 && !source_shape.empty()) DS_TRY(lay_into_blocks(view, parts, part.size, named));

  ElementMap out;
  std::vector<std::vector<Item>> dims;
  for (const std::vector<std::string>& words : right) {
    dims.emplace_back();
    for (const std::string& word : words) {
      DS_ASSIGN(const std::vector<Item> items, items_of(view, word, named, names));
      dims.back().insert(dims.back().end(), items.begin(), items.end());
    }
  }
  std::uint64_t stride = 1;
  std::uint64_t places = 1;  // as if no axis were empty
  std::vector<FixedAxis> fixed;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    std::uint64_t size = 1;
    for (auto item = dim->rbegin(); item != dim->rend(); ++item) {
      const std::uint64_t extent = item->axis != nullptr ? item->axis->extent : item->fixed.extent;
      if (item->axis == nullptr) {  // it takes the place of the axes to its right, which are `count`
        stride /= item->fixed.count;
        size /= item->fixed.count;
        places /= item->fixed.count;
      }
      (item->axis != nullptr ? item->axis->target_stride : item->fixed.stride) = stride;
      if (item->axis == nullptr) fixed.push_back(item->fixed);
      const std::uint64_t at_least = std::max<std::uint64_t>(extent, 1);
      if (places > kModelBytesMax / at_least) return wrong(view, "its right has more elements than a model may have");
      places *= at_least;
      stride *= extent;
      size *= extent;
    }
    out.target_shape.insert(out.target_shape.begin(), size);
  }
  out.fixed.assign(fixed.rbegin(), fixed.rend());
  for (const auto& [name, axes] : named) {
    for (const Axis& axis : axes) {
      if (axis.target_stride == 0) return wrong(view, "'" + name + "' is not on its right");
      out.axes.push_back(axis);
    }
  }
  std::sort(out.axes.begin(), out.axes.end(), [](const Axis& a, const Axis& b) {
    return a.source_dim != b.source_dim ? a.source_dim < b.source_dim : a.source_stride > b.source_stride;
  });
  out.source_begins.assign(source_shape.size(), 0);
  if (!source_shape.empty()) out.source_begins.front() = part.begin;
  return out;
}

}  // namespace deltasync::exporting
