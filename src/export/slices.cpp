// A copy as rectangles of its tensor's 2-D view.
#include <algorithm>
#include <utility>

#include "deltasync/export.hpp"

namespace deltasync {
namespace {

constexpr std::size_t kSlicesMax = 1 << 16;  ///< of one copy; more are elements that lie apart

/// Elements that lie side by side in the target, and those that lie below them.
struct Block {
  CopyStep across{1, 1, 1};
  CopyStep down{1, 0, 0};
};

class Slicer {
 public:
  Slicer(const Tensor& tensor, std::uint32_t piece) : tensor_(tensor), piece_(piece) {}

  /// Every combination of the steps before the last `left`, each with the block.
  bool walk(std::span<const CopyStep> steps, const Block& block, std::uint64_t source, std::uint64_t target) {
    if (steps.empty()) return add(block, source, target);
    for (std::uint64_t i = 0; i < steps.front().count; ++i) {
      const std::uint64_t from = source + i * steps.front().source_stride;
      if (!walk(steps.subspan(1), block, from, target + i * steps.front().target_stride)) return false;
    }
    return true;
  }

  std::vector<PlacedSlice> made;

 private:
  bool add(const Block& block, std::uint64_t source, std::uint64_t target) {
    const std::uint64_t cols = tensor_.cols;
    const std::uint64_t count = block.across.count;
    const std::uint64_t step = block.across.source_stride;
    if (target % cols + count <= cols) {
      return put({target / cols, target % cols, block.down.count, count}, source, block.down.source_stride, step);
    }
    // A run over several rows: the end of the first, whole ones, the beginning of the last.
    const std::uint64_t head = (cols - target % cols) % cols;
    const std::uint64_t whole = (count - head) / cols;
    const std::uint64_t tail = count - head - whole * cols;
    const std::uint64_t row = (target + head) / cols;
    return (head == 0 || put({target / cols, target % cols, 1, head}, source, 0, step)) &&
           (whole == 0 || put({row, 0, whole, cols}, source + head * step, cols * step, step)) &&
           (tail == 0 || put({row + whole, 0, 1, tail}, source + (count - tail) * step, 0, step));
  }

  bool put(const Rect& rect, std::uint64_t source, std::uint64_t row_stride, std::uint64_t col_stride) {
    if (made.size() == kSlicesMax) return false;
    const std::uint64_t width = tensor_.element_bytes;
    made.push_back({.tensor = tensor_.spec.name,
                    .rect = rect,
                    .memory = piece_,
                    .offset = source * width,
                    .row_stride = row_stride * width,
                    .col_stride = col_stride * width});
    return true;
  }

  const Tensor& tensor_;
  std::uint32_t piece_;
};

}  // namespace

Result<std::vector<PlacedSlice>> export_slices(const ExportPlan& plan, const ExportCopy& copy, Dtype source_dtype) {
  if (copy.tensor >= plan.layout->tensors().size()) return Error(Errc::out_of_range, "a copy to no tensor of the plan");
  const Tensor& tensor = plan.layout->tensors()[copy.tensor];
  if (copy.elements() == 0) return std::vector<PlacedSlice>();
  if (copy.target_offset >= tensor.rows * tensor.cols) {
    return Error(Errc::out_of_range, tensor.spec.name + ": a copy beyond its end");
  }
  if (source_dtype != tensor.spec.dtype || copy.add != 0) {
    return Error(Errc::unsupported, tensor.spec.name + ": its values are computed, which apply_on_host() does");
  }
  std::span<const CopyStep> steps(copy.steps);
  Block block;
  if (!steps.empty() && steps.back().target_stride == 1) {
    block.across = steps.back();
    steps = steps.first(steps.size() - 1);
  }
  if (!steps.empty() && steps.back().target_stride == tensor.cols &&
      copy.target_offset % tensor.cols + block.across.count <= tensor.cols) {
    block.down = steps.back();
    steps = steps.first(steps.size() - 1);
  }
  Slicer slicer(tensor, copy.piece);
  if (!slicer.walk(steps, block, copy.source_offset, copy.target_offset)) {
    return Error(Errc::unsupported,
                 tensor.spec.name + ": its elements are moved one by one, which apply_on_host() does");
  }
  return std::move(slicer.made);
}

}  // namespace deltasync
