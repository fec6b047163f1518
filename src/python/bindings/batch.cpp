#include "python/bindings/batch.hpp"

#include <utility>

namespace deltasync::python {
namespace {

using namespace nb::literals;

void add_rect(Batch& batch, std::uint32_t tensor, std::uint64_t row, std::uint64_t col, std::uint64_t rows,
              std::uint64_t cols, std::uintptr_t address, std::size_t row_stride_bytes, int device,
              std::uintptr_t stream, nb::handle owner, std::size_t col_stride_bytes) {
  Source source;
  source.data = reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
  source.row_stride_bytes = row_stride_bytes;
  source.col_stride_bytes = col_stride_bytes;
  if (device >= 0) {
    source.device = {device};
    source.stream = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
  }
  batch.add({{tensor, {row, col, rows, cols}}, source}, owner.is_none() ? nb::handle() : owner);
}

}  // namespace

std::vector<TensorSlice> Batch::plan() const {
  std::vector<TensorSlice> plan;
  plan.reserve(slices_.size());
  for (const SliceSource& item : slices_) plan.push_back(item.slice);
  return plan;
}

void bind_batch(nb::module_& module) {
  nb::class_<Batch>(module, "Batch",
                    "Slices and where their bytes are, for Writer.write_batch. Keeps owners until clear().")
      .def(nb::init<>())
      .def("add", &add_rect, "tensor"_a, "row"_a, "col"_a, "rows"_a, "cols"_a, "address"_a, "row_stride_bytes"_a = 0,
           "device"_a = -1, "stream"_a = 0, "owner"_a = nb::none(), "col_stride_bytes"_a = 0,
           "A rectangle of the tensor (layout index) and where its bytes begin; device: a CUDA ordinal, or -1.")
      .def("clear", &Batch::clear)
      .def("__len__", &Batch::size);
}

}  // namespace deltasync::python
