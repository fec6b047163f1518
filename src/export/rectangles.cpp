#include "export/rectangles.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace deltasync::exporting {
namespace {

/// Elements that lie side by side in the target, and those that lie below them.
struct Block {
  CopyStep across{1, 1, 1};
  CopyStep down{1, 0, 0};
};

struct Found {
  Rect rect;
  Run run;
};

/// The rectangles of one copy. The steps before the last ones are walked: each of their combinations has the block.
class Slicer {
 public:
  Slicer(std::uint64_t cols, std::uint32_t piece, std::size_t most) : cols_(cols), piece_(piece), most_(most) {}

  /// nullopt: more than so many.
  std::optional<std::vector<Found>> of(const ExportCopy& copy) && {
    std::span<const CopyStep> steps(copy.steps);
    if (!steps.empty() && steps.back().target_stride == 1) {
      block_.across = steps.back();
      steps = steps.first(steps.size() - 1);
    }
    if (!steps.empty() && steps.back().target_stride == cols_ &&
        copy.target_offset % cols_ + block_.across.count <= cols_) {
      block_.down = steps.back();
      steps = steps.first(steps.size() - 1);
    }
    if (!walk(steps, copy.source_offset, copy.target_offset)) return std::nullopt;
    return std::move(made_);
  }

 private:
  bool walk(std::span<const CopyStep> steps, std::uint64_t source, std::uint64_t target) {
    if (steps.empty()) return add(source, target);
    for (std::uint64_t i = 0; i < steps.front().count; ++i) {
      const std::uint64_t from = source + i * steps.front().source_stride;
      if (!walk(steps.subspan(1), from, target + i * steps.front().target_stride)) return false;
    }
    return true;
  }

  bool add(std::uint64_t source, std::uint64_t target) {
    const std::uint64_t count = block_.across.count;
    const std::uint64_t step = block_.across.source_stride;
    if (target % cols_ + count <= cols_) {
      const std::uint64_t down = block_.down.source_stride;
      return put({target / cols_, target % cols_, block_.down.count, count}, source, down, step);
    }
    // A run over several rows: the end of the first, whole ones, the beginning of the last.
    const std::uint64_t head = (cols_ - target % cols_) % cols_;
    const std::uint64_t whole = (count - head) / cols_;
    const std::uint64_t tail = count - head - whole * cols_;
    const std::uint64_t row = (target + head) / cols_;
    return (head == 0 || put({target / cols_, target % cols_, 1, head}, source, 0, step)) &&
           (whole == 0 || put({row, 0, whole, cols_}, source + head * step, cols_ * step, step)) &&
           (tail == 0 || put({row + whole, 0, 1, tail}, source + (count - tail) * step, 0, step));
  }

  bool put(const Rect& rect, std::uint64_t source, std::uint64_t row_stride, std::uint64_t col_stride) {
    if (made_.size() == most_) return false;
    made_.push_back({rect, {piece_, source, row_stride, col_stride}});
    return true;
  }

  std::uint64_t cols_;
  std::uint32_t piece_;
  std::size_t most_;
  Block block_;
  std::vector<Found> made_;
};

using Group = std::vector<const ExportCopy*>;

/// From one element of a run in the target to the next.
std::uint64_t innermost(const ExportCopy& copy) {
  return copy.steps.empty() ? 1 : std::max<std::uint64_t>(copy.steps.back().target_stride, 1);
}

/// Whether the elements of these copies alternate in the target, so that together they lie side by side.
bool alternates(const Group& group, std::uint64_t cols) {
  const std::uint64_t every = innermost(*group.front());
  return group.size() > 1 && group.size() == every && cols % every == 0 &&
         std::ranges::all_of(group.front()->steps,
                             [&](const CopyStep& step) { return step.target_stride % every == 0; });
}

/// Copies that go together, ordered by their place; others alone.
std::vector<Group> groups_of(std::span<const ExportCopy> copies, std::uint64_t cols) {
  using Form = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  std::map<std::tuple<std::uint64_t, Form, double>, Group> alike;
  for (const ExportCopy& copy : copies) {
    Form form;
    for (const CopyStep& step : copy.steps) form.emplace_back(step.count, step.target_stride);
    alike[{copy.target_offset / innermost(copy), std::move(form), copy.add}].push_back(&copy);
  }
  std::vector<Group> out;
  for (auto& [form, group] : alike) {
    std::ranges::sort(group, {}, [](const ExportCopy* copy) { return copy->target_offset; });
    if (alternates(group, cols)) {
      out.push_back(std::move(group));
    } else {
      for (const ExportCopy* copy : group) out.push_back({copy});
    }
  }
  return out;
}

/// As if the target had one column for all copies of a group.
ExportCopy narrowed(const ExportCopy& copy, std::uint64_t every) {
  ExportCopy out = copy;
  out.target_offset /= every;
  for (CopyStep& step : out.steps) step.target_stride /= every;
  return out;
}

}  // namespace

Rectangles rectangles_of(std::span<const ExportCopy> copies, std::uint64_t cols, std::size_t most) {
  Rectangles out;
  if (cols == 0) return out;  // of an empty tensor there is nothing to copy
  for (const Group& group : groups_of(copies, cols)) {
    const auto every = static_cast<std::uint64_t>(group.size());
    const std::size_t first = out.made.size();
    for (const ExportCopy* copy : group) {
      if (copy->elements() == 0) continue;
      auto found = Slicer(cols / every, copy->piece, most).of(narrowed(*copy, every));
      if (!found) return {{}, copy};
      for (std::size_t i = 0; i < found->size(); ++i) {
        const Rect& rect = (*found)[i].rect;
        if (copy == group.front()) {
          out.made.push_back({copy->tensor, {rect.row, rect.col * every, rect.rows, rect.cols * every}, {}, copy->add});
        }
        out.made[first + i].runs.push_back((*found)[i].run);
      }
    }
  }
  return out;
}

}  // namespace deltasync::exporting
