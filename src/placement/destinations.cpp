#include "placement/destinations.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

namespace deltasync {
namespace {

using Pair = std::pair<std::size_t, std::size_t>;

struct Axis {
  std::uint64_t count = 1;
  std::uint64_t stride = 0;
};

/// A destination as runs of bytes: `outer` × `inner` of them. A dense inner dimension is part of the run.
struct Runs {
  std::size_t index = 0;  ///< of the destination
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  ///< behind the last byte
  std::uint64_t run_bytes = 0;
  Axis outer;
  Axis inner;
};

Runs runs_of(const Destination& d, std::size_t index) {
  Runs runs{index, d.offset, 0, d.element_bytes, {d.rows, d.row_stride}, {d.cols, d.col_stride}};
  if (runs.inner.count == 1) std::swap(runs.inner, runs.outer);
  if (runs.outer.count > 1 && runs.outer.stride < runs.inner.stride) std::swap(runs.inner, runs.outer);
  for (int i = 0; i < 2; ++i) {  // at most both are dense
    if (runs.inner.count > 1 && runs.inner.stride == runs.run_bytes) {
      runs.run_bytes *= runs.inner.count;
      runs.inner = std::exchange(runs.outer, Axis());
    }
  }
  if (runs.outer.count == 1) std::swap(runs.inner, runs.outer);
  runs.end = runs.begin + (runs.outer.count - 1) * runs.outer.stride + (runs.inner.count - 1) * runs.inner.stride +
             runs.run_bytes;
  return runs;
}

/// Walks the rows from top to bottom with the rectangles that the current row crosses, by first column.
class Sweep {
 public:
  explicit Sweep(std::span<const Rect> rects) : rects_(rects) {}

  std::optional<Pair> run() {
    struct Event {
      std::uint64_t row = 0;
      bool begins = false;
      std::size_t rect = 0;
    };
    std::vector<Event> events;
    events.reserve(rects_.size() * 2);
    for (std::size_t i = 0; i < rects_.size(); ++i) {
      events.push_back({rects_[i].row, true, i});
      events.push_back({rects_[i].row + rects_[i].rows, false, i});
    }
    std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
      return a.row != b.row ? a.row < b.row : a.begins < b.begins;  // what ends at a row goes before what begins there
    });
    for (const Event& event : events) {
      if (!event.begins) {
        active_.erase(rects_[event.rect].col);
      } else if (const auto other = add(event.rect)) {
        return Pair(std::min(*other, event.rect), std::max(*other, event.rect));
      }
    }
    return std::nullopt;
  }

 private:
  /// The one that is in the way.
  std::optional<std::size_t> add(std::size_t index) {
    const Rect& rect = rects_[index];
    const auto next = active_.lower_bound(rect.col);
    if (next != active_.end() && next->first < rect.col + rect.cols) return next->second;
    if (next != active_.begin()) {
      const std::size_t before = std::prev(next)->second;
      if (rects_[before].col + rects_[before].cols > rect.col) return before;
    }
    active_.emplace_hint(next, rect.col, index);
    return std::nullopt;
  }

  const std::span<const Rect> rects_;
  std::map<std::uint64_t, std::size_t> active_;
};

/// Sorted by their first bytes.
std::optional<Pair> plain_runs_overlap(std::span<const Runs> group) {
  for (std::size_t i = 1; i < group.size(); ++i) {
    if (group[i].begin < group[i - 1].end) return Pair(group[i - 1].index, group[i].index);
  }
  return std::nullopt;
}

/// The pitch that makes rectangles of all, if there is one: rows are what lies a pitch apart. 0: there is none.
std::uint64_t common_pitch(std::span<const Runs> group) {
  std::uint64_t pitch = 0;
  for (const Runs& runs : group) {
    if (runs.inner.count > 1) return 0;
    if (runs.outer.count == 1) continue;
    if (pitch != 0 && runs.outer.stride != pitch) return 0;
    pitch = runs.outer.stride;
  }
  return pitch;
}

/// As rectangles of (address / pitch, address % pitch). What passes the end of a row goes on at the next one's begin.
void add_rects(const Runs& runs, std::uint64_t origin, std::uint64_t pitch, std::vector<Rect>& rects) {
  const std::uint64_t row = (runs.begin - origin) / pitch;
  const std::uint64_t col = (runs.begin - origin) % pitch;
  const std::uint64_t head = std::min(runs.run_bytes, pitch - col);
  rects.push_back({row, col, runs.outer.count, head});
  const std::uint64_t rest = runs.run_bytes - head;
  if (rest == 0) return;
  if (runs.outer.count > 1) {  // a run is no longer than the pitch
    rects.push_back({row + 1, 0, runs.outer.count, rest});
    return;
  }
  if (rest >= pitch) rects.push_back({row + 1, 0, rest / pitch, pitch});
  if (rest % pitch != 0) rects.push_back({row + 1 + rest / pitch, 0, 1, rest % pitch});
}

std::optional<Pair> rects_overlap(std::span<const Runs> group, std::uint64_t pitch) {
  std::vector<Rect> rects;
  std::vector<std::size_t> of;
  for (const Runs& runs : group) {
    add_rects(runs, group.front().begin, pitch, rects);
    of.resize(rects.size(), runs.index);
  }
  const auto found = Sweep(rects).run();
  if (!found) return std::nullopt;
  return Pair(of[found->first], of[found->second]);
}

/// Calls fn(first byte) for each run until it says true.
template <class Fn>
bool any_run(const Runs& runs, const Fn& fn) {
  for (std::uint64_t o = 0; o < runs.outer.count; ++o) {
    for (std::uint64_t i = 0; i < runs.inner.count; ++i) {
      if (fn(runs.begin + o * runs.outer.stride + i * runs.inner.stride)) return true;
    }
  }
  return false;
}

bool has_byte(const Runs& runs, std::uint64_t byte) {
  return any_run(runs, [&](std::uint64_t begin) { return begin <= byte && byte < begin + runs.run_bytes; });
}

/// Whatever the strides: a bit for each piece of memory as wide as the narrowest element.
std::optional<Pair> marks_overlap(std::span<const Runs> group, std::uint64_t unit) {
  const std::uint64_t origin = group.front().begin;
  std::uint64_t end = origin;
  for (const Runs& runs : group) end = std::max(end, runs.end);
  std::vector<bool> taken(static_cast<std::size_t>((end - origin + unit - 1) / unit));
  for (std::size_t k = 0; k < group.size(); ++k) {
    std::uint64_t shared = 0;
    const bool twice = any_run(group[k], [&](std::uint64_t begin) {
      for (std::uint64_t at = begin; at < begin + group[k].run_bytes; at += unit) {
        auto bit = taken[static_cast<std::size_t>((at - origin) / unit)];
        shared = at;
        if (bit) return true;
        bit = true;
      }
      return false;
    });
    if (!twice) continue;
    const auto other = std::find_if(group.begin(), group.end(), [&](const Runs& r) { return has_byte(r, shared); });
    return Pair(other->index, group[k].index);
  }
  return std::nullopt;
}

}  // namespace

/// r rows and c columns apart lies the same byte: with r·row_stride = c·col_stride, the smallest such r and c being the
/// strides without their common divisor. Else elements are at least one width apart, both being multiples of it.
bool folds_onto_itself(const Destination& d) noexcept {
  if (d.rows > 1 && d.row_stride == 0) return true;
  if (d.cols > 1 && d.col_stride == 0) return true;
  if (d.rows <= 1 || d.cols <= 1) return false;
  const std::uint64_t common = std::gcd(d.row_stride, d.col_stride);
  return d.col_stride / common < d.rows && d.row_stride / common < d.cols;
}

std::optional<Pair> find_shared_byte(std::span<const Destination> destinations) {
  std::vector<Runs> all;
  all.reserve(destinations.size());
  for (std::size_t i = 0; i < destinations.size(); ++i) all.push_back(runs_of(destinations[i], i));
  std::sort(all.begin(), all.end(), [](const Runs& a, const Runs& b) { return a.begin < b.begin; });
  for (std::size_t first = 0; first < all.size();) {
    // Those that lie between each other's ends.
    std::uint64_t end = all[first].end;
    std::uint64_t unit = destinations[all[first].index].element_bytes;
    bool plain = true;
    std::size_t last = first;
    for (; last < all.size() && (last == first || all[last].begin < end); ++last) {
      end = std::max(end, all[last].end);
      unit = std::min<std::uint64_t>(unit, destinations[all[last].index].element_bytes);
      plain = plain && all[last].outer.count == 1;
    }
    const auto group = std::span<const Runs>(all).subspan(first, last - first);
    first = last;
    if (group.size() == 1) continue;
    std::optional<Pair> found;
    if (plain) {
      found = plain_runs_overlap(group);
    } else if (const std::uint64_t pitch = common_pitch(group); pitch != 0) {
      found = rects_overlap(group, pitch);
    } else {
      found = marks_overlap(group, unit);
    }
    if (found) return Pair(std::min(found->first, found->second), std::max(found->first, found->second));
  }
  return std::nullopt;
}

}  // namespace deltasync
