#include "placement/destinations.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
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

/// Runs of one destination in the order of their addresses: `outer` rows of `inner` runs each, one row behind the
/// other.
class Series {
 public:
  Series(std::size_t of, std::uint64_t begin, std::uint64_t run_bytes, const Axis& outer, const Axis& inner)
      : of_(of), begin_(begin), run_bytes_(run_bytes), outer_(outer), inner_(inner) {}

  std::size_t of() const noexcept { return of_; }  ///< the destination
  std::uint64_t at() const noexcept { return begin_ + o_ * outer_.stride + i_ * inner_.stride; }

  /// Goes to the first run that begins at `limit` or behind it, false if there is none; one at least is passed. `end`
  /// is where the last one that was passed ends.
  bool pass(std::uint64_t limit, std::uint64_t& end) noexcept {
    if (limit > at()) {
      // As many rows as begin before the limit; then as many runs of the last of these.
      const std::uint64_t row =
          outer_.count == 1 ? 0 : std::min((limit - 1 - begin_) / outer_.stride, outer_.count - 1);
      if (row != o_) i_ = 0;
      o_ = row;
      const std::uint64_t left = limit - at();
      const std::uint64_t last = inner_.count == 1 ? 0 : (left - 1) / inner_.stride;
      i_ = std::min(i_ + last, inner_.count - 1);
    }
    end = at() + run_bytes_;
    if (++i_ < inner_.count) return true;
    i_ = 0;
    return ++o_ < outer_.count;
  }

 private:
  std::size_t of_;
  std::uint64_t begin_;
  std::uint64_t run_bytes_;
  Axis outer_;
  Axis inner_;
  std::uint64_t o_ = 0;
  std::uint64_t i_ = 0;
};

/// Whose rows lie within each other falls into several: as few as go.
void add_series(const Runs& runs, std::vector<Series>& all) {
  const Axis& outer = runs.outer;
  const Axis& inner = runs.inner;
  if (outer.count == 1 || (inner.count - 1) * inner.stride + runs.run_bytes <= outer.stride) {
    all.emplace_back(runs.index, runs.begin, runs.run_bytes, outer, inner);
    return;
  }
  const bool along_outer = outer.count >= inner.count;
  const Axis& along = along_outer ? outer : inner;
  const Axis& each = along_outer ? inner : outer;
  for (std::uint64_t i = 0; i < each.count; ++i) {
    all.emplace_back(runs.index, runs.begin + i * each.stride, runs.run_bytes, Axis(), along);
  }
}

/// Whatever the strides: all runs are met in the order of their addresses. Costs as often as one destination's follow
/// another's, at most as many as there are runs.
std::optional<Pair> any_overlap(std::span<const Runs> group) {
  std::vector<Series> heap;
  for (const Runs& runs : group) add_series(runs, heap);
  const auto later = [](const Series& a, const Series& b) { return a.at() > b.at(); };
  std::make_heap(heap.begin(), heap.end(), later);
  std::uint64_t reach = 0;  // where the last one ends
  std::size_t whose = 0;
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    Series& series = heap.back();
    if (series.at() < reach) return Pair(whose, series.of());
    const std::uint64_t next = heap.size() == 1 ? std::numeric_limits<std::uint64_t>::max() : heap.front().at();
    whose = series.of();
    if (series.pass(next, reach)) {
      std::push_heap(heap.begin(), heap.end(), later);
    } else {
      heap.pop_back();
    }
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
    bool plain = true;
    std::size_t last = first;
    for (; last < all.size() && (last == first || all[last].begin < end); ++last) {
      end = std::max(end, all[last].end);
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
      found = any_overlap(group);
    }
    if (found) return Pair(std::min(found->first, found->second), std::max(found->first, found->second));
  }
  return std::nullopt;
}

}  // namespace deltasync
