#include "python/bindings/plain.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "python/bindings/batch.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

// The table of functions in the capsule, as DLPack 1.3 defines it (dmlc.github.io/dlpack, "C API", DLPackExchangeAPI).
constexpr std::uint32_t kExchangeMajor = 1;
constexpr const char* kExchangeName = "dlpack_exchange_api";

struct ExchangeHeader {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeHeader* older;  ///< the table for consumers of an older major version, or null
};

struct ExchangeApi {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*describe)(void* tensor, nb::dlpack::dltensor* out);  ///< may be null
  void* current_stream;
};

nb::dlpack::dtype dtype_of(Dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = [&] {
    switch (dtype) {
      case Dtype::f64:
      case Dtype::f32:
      case Dtype::f16: return Code::Float;
      case Dtype::bf16: return Code::Bfloat;
      case Dtype::f8_e4m3: return Code::Float8_E4M3FN;
      case Dtype::f8_e5m2: return Code::Float8_E5M2;
      case Dtype::i64:
      case Dtype::i32:
      case Dtype::i16:
      case Dtype::i8: return Code::Int;
      case Dtype::boolean: return Code::Bool;
      case Dtype::u8:
      case Dtype::u16:
      case Dtype::u32:
      case Dtype::u64: break;
      case Dtype::f8_e8m0: return Code::Float8_E8M0FNU;
      case Dtype::f8_e4m3fnuz: return Code::Float8_E4M3FNUZ;
      case Dtype::f8_e5m2fnuz: return Code::Float8_E5M2FNUZ;
      case Dtype::c64: return Code::Complex;
      case Dtype::f4: return Code::Float4_E2M1FN;
    }
    return Code::UInt;
  }();
  const auto lanes = dtype_packed(dtype);
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * dtype_bytes(dtype) / lanes),
          static_cast<std::uint16_t>(lanes)};
}

/// Whether it is all of the tensor, one element behind the other.
bool is_whole(const nb::dlpack::dltensor& have, const Tensor& tensor) {
  const auto& shape = tensor.spec.shape;
  if (have.dtype != dtype_of(tensor.spec.dtype) || static_cast<std::size_t>(have.ndim) != shape.size()) return false;
  std::uint64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    const std::uint64_t size = i + 1 == shape.size() ? shape[i] / dtype_packed(tensor.spec.dtype) : shape[i];
    if (static_cast<std::uint64_t>(have.shape[i]) != size) return false;
    if (have.strides != nullptr && size != 1 && static_cast<std::uint64_t>(have.strides[i]) != step) return false;
    step *= size;
  }
  // Empty ones are as good as strided. Of torch's conjugate and negative bits DLPack does not tell. The latter are
  // imaginary parts: they have gaps, unless they are of one element.
  if (tensor.spec.dtype == Dtype::c64) return false;
  return step != 0 && !(step == 1 && dtype_is_float(tensor.spec.dtype));
}

}  // namespace

PlainTensors::PlainTensors(std::shared_ptr<const Layout> layout, nb::dict index, nb::tuple types, nb::object exchange)
    : layout_(std::move(layout)), index_(std::move(index)), types_(std::move(types)), exchange_(std::move(exchange)) {
  next_.resize(layout_->tensors().size());
  std::iota(next_.begin(), next_.end(), 1U);
  if (exchange_.is_none()) return;
  const auto* header = static_cast<const ExchangeHeader*>(PyCapsule_GetPointer(exchange_.ptr(), kExchangeName));
  if (header == nullptr) throw nb::python_error();
  while (header != nullptr && header->major != kExchangeMajor) header = header->older;
  if (header != nullptr) describe_ = reinterpret_cast<const ExchangeApi*>(header)->describe;
}

std::size_t PlainTensors::index_of(nb::handle name) {
  const auto tensors = layout_->tensors();
  const std::size_t expected = last_ < next_.size() ? next_[last_] : 0;
  if (expected < tensors.size() && PyUnicode_CheckExact(name.ptr())) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
    if (text == nullptr) PyErr_Clear();  // surrogates, which no layout has
    if (text != nullptr && tensors[expected].spec.name == std::string_view(text, static_cast<std::size_t>(size))) {
      return expected;
    }
  }
  PyObject* at = PyDict_GetItemWithError(index_.ptr(), name.ptr());
  const std::size_t index = at == nullptr ? SIZE_MAX : PyLong_AsSize_t(at);
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return index < tensors.size() ? index : SIZE_MAX;
}

bool PlainTensors::is_in_storage(nb::handle tensor, const void* data, std::uint64_t bytes) const {
  const nb::object storage = tensor.attr(storage_)();
  const auto first = nb::cast<std::uintptr_t>(storage.attr(address_)());
  const auto size = nb::cast<std::uint64_t>(storage.attr(size_)());
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return first != 0 && begin >= first && begin - first <= size && bytes <= size - (begin - first);
}

std::optional<SliceSource> PlainTensors::find(nb::handle name, nb::handle tensor) {
  if (describe_ == nullptr || !PyUnicode_Check(name.ptr())) return std::nullopt;
  const auto is_type = [&](nb::handle type) {
    return type.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  };
  if (std::none_of(types_.begin(), types_.end(), is_type)) return std::nullopt;
  const std::size_t index = index_of(name);
  if (index == SIZE_MAX) return std::nullopt;
  if (last_ < next_.size()) next_[last_] = static_cast<std::uint32_t>(index);
  last_ = index;
  nb::dlpack::dltensor have;
  if (describe_(tensor.ptr(), &have) != 0) {  // it has no memory, say, which a closer look will name
    PyErr_Clear();
    return std::nullopt;
  }
  const Tensor& whole = layout_->tensors()[index];
  if (have.device.device_type != nb::device::cpu::value || !is_whole(have, whole)) return std::nullopt;
  Source source;
  source.data = static_cast<const std::byte*>(have.data) + have.byte_offset;
  if (!is_in_storage(tensor, source.data, whole.bytes)) return std::nullopt;
  return SliceSource{{static_cast<std::uint32_t>(index), {0, 0, whole.rows, whole.cols}}, source};
}

nb::object OddPairs::next() {
  for (;;) {
    nb::object pair = nb::steal(PyIter_Next(pairs_.ptr()));
    if (!pair.is_valid()) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      throw nb::stop_iteration();
    }
    if (!PyTuple_CheckExact(pair.ptr()) || PyTuple_Size(pair.ptr()) != 2) return pair;
    const nb::handle tensor = PyTuple_GetItem(pair.ptr(), 1);
    const auto item = plain_->find(PyTuple_GetItem(pair.ptr(), 0), tensor);
    if (!item) return pair;
    fresh_.push_back(reinterpret_cast<std::uintptr_t>(item->source.data));
    take_(*item, tensor);
  }
}

bool OddPairs::saw(std::uintptr_t address) {
  seen_.insert(fresh_.begin(), fresh_.end());
  fresh_.clear();
  return seen_.contains(address);
}

void bind_plain(nb::module_& module) {
  nb::class_<PlainTensors>(module, "PlainTensors", "Finds whole tensors of a layout in dense host memory.")
      .def(nb::init<std::shared_ptr<Layout>, nb::dict, nb::tuple, nb::object>(), "layout"_a, "index"_a, "types"_a,
           "exchange"_a.none())
      .def(
          "into",
          [](PlainTensors& plain, Batch& batch, const nb::object& pairs) {
            return OddPairs(plain, nb::iter(pairs),
                            [&batch](const SliceSource& item, nb::handle tensor) { batch.add(item, tensor); });
          },
          "batch"_a, "pairs"_a, nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(),
          "Adds the plain ones to the batch; an iterator of the others.");
  nb::class_<OddPairs>(module, "OddPairs", "Pairs of name and tensor that are not plain.")
      .def(
          "__iter__", [](nb::object self) { return self; }, nb::sig("def __iter__(self) -> OddPairs"))
      .def("__next__", &OddPairs::next, nb::sig("def __next__(self) -> tuple[str, object]"))
      .def("saw", &OddPairs::saw, "address"_a, "Whether a plain tensor that came so far begins there.");
}

}  // namespace deltasync::python
