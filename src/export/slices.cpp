// A copy as rectangles of its tensor's 2-D view, for C++.
#include "deltasync/export.hpp"
#include "export/rectangles.hpp"

namespace deltasync {

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
  const exporting::Rectangles found = exporting::rectangles_of({&copy, 1}, tensor.cols);
  if (found.apart != nullptr) {
    return Error(Errc::unsupported,
                 tensor.spec.name + ": its elements are moved one by one, which apply_on_host() does");
  }
  std::vector<PlacedSlice> slices;
  slices.reserve(found.made.size());
  const std::uint64_t width = tensor.element_bytes;
  for (const exporting::Rectangle& rectangle : found.made) {
    const exporting::Run& run = rectangle.runs.front();
    slices.push_back({.tensor = tensor.spec.name,
                      .rect = rectangle.rect,
                      .memory = run.piece,
                      .offset = run.offset * width,
                      .row_stride = run.row_stride * width,
                      .col_stride = run.col_stride * width});
  }
  return slices;
}

}  // namespace deltasync
