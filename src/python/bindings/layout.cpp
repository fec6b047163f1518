#include <nanobind/make_iterator.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "deltasync/layout.hpp"
#include "deltasync/part.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

nb::bytes to_bytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

std::span<const std::byte> span_of(const nb::bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

Dtype dtype_named(const std::string& name) {
  const auto dtype = dtype_from_string(name);
  if (!dtype) throw Failure{Error(Errc::invalid_argument, "no dtype of safetensors is called '" + name + "'")};
  return *dtype;
}

TensorSpec make_spec(std::string name, const std::string& dtype, std::vector<std::uint64_t> shape,
                     std::vector<std::uint64_t> row_cuts, std::vector<std::uint64_t> col_cuts) {
  return {std::move(name), dtype_named(dtype), std::move(shape), std::move(row_cuts), std::move(col_cuts)};
}

const Tensor& tensor_at(const Layout& layout, std::int64_t index) {
  const auto count = static_cast<std::int64_t>(layout.tensors().size());
  if (index < 0) index += count;
  if (index < 0 || index >= count) throw nb::index_error("layout index out of range");
  return layout.tensors()[static_cast<std::size_t>(index)];
}

Sidecar make_named_sidecar(const Layout& layout, const std::string& file, const nb::dict& others) {
  Sidecar sidecar = make_sidecar(layout);
  if (!sidecar.weights.empty()) sidecar.weights.front().name = file;
  for (const auto& [name, bytes] : others) {
    const auto contents = nb::cast<nb::bytes>(bytes);
    const auto span = span_of(contents);
    sidecar.others.push_back({nb::cast<std::string>(name), {span.begin(), span.end()}});
  }
  const auto encoded = sidecar.encode();  // its decoder is what checks names, which came from no file here
  auto checked = Sidecar::decode(encoded, layout);
  if (!checked) throw Failure{Error(Errc::invalid_argument, checked.error().message())};
  return *std::move(checked);
}

/// (tensor, row, column, rows, columns)
using Rectangle = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::vector<TensorSlice> slices_of(const std::vector<Rectangle>& rectangles) {
  std::vector<TensorSlice> slices;
  slices.reserve(rectangles.size());
  for (const auto& [tensor, row, col, rows, cols] : rectangles) slices.push_back({tensor, {row, col, rows, cols}});
  return slices;
}

std::shared_ptr<Layout> layout_with_cuts(const Layout& layout, const std::vector<Rectangle>& rectangles) {
  std::vector<TensorSpec> specs;
  specs.reserve(layout.tensors().size());
  for (const Tensor& tensor : layout.tensors()) specs.push_back(tensor.spec);
  unwrap(add_cuts(specs, slices_of(rectangles)));
  return std::const_pointer_cast<Layout>(unwrap(Layout::build(std::move(specs))));
}

nb::tuple part_of(const std::shared_ptr<Layout>& whole, const Sidecar& sidecar, const std::vector<Rectangle>& held,
                  const std::vector<std::pair<std::string, std::string>>& members, std::uint32_t self) {
  auto [layout, mine] = unwrap(make_part(whole, sidecar, slices_of(held), members, self));
  return nb::make_tuple(std::const_pointer_cast<Layout>(layout), std::move(mine));
}

std::vector<Rectangle> rectangles_of(const std::vector<TensorSlice>& slices) {
  std::vector<Rectangle> rectangles;
  rectangles.reserve(slices.size());
  for (const auto& [tensor, rect] : slices) rectangles.emplace_back(tensor, rect.row, rect.col, rect.rows, rect.cols);
  return rectangles;
}

std::vector<Rectangle> joined(const Layout& layout, const std::vector<Rectangle>& rectangles) {
  return rectangles_of(unwrap(join_slices(layout, slices_of(rectangles))));
}

void require_all_held(const Layout& layout, const std::vector<std::pair<std::string, std::vector<Rectangle>>>& nodes) {
  std::vector<std::pair<std::string, std::vector<TensorSlice>>> held;
  held.reserve(nodes.size());
  for (const auto& [name, rectangles] : nodes) held.emplace_back(name, slices_of(rectangles));
  unwrap(check_nodes(layout, held));
}

std::vector<Rectangle> in_part(const Sidecar& sidecar, const Layout& layout, const std::vector<Rectangle>& rectangles) {
  return rectangles_of(unwrap(slices_in_part(sidecar, layout, slices_of(rectangles))));
}

void bind_parts(nb::module_& module) {
  module.def("joined", &joined, "layout"_a, "rectangles"_a,
             "What the ranks of a node hold, as few rectangles as neighbours make. CoverageError: two overlap.");
  module.def("check_nodes", &require_all_held, "layout"_a, "nodes"_a,
             "CoverageError unless each element is in a rectangle of one of the nodes: (name, rectangles).");
  module.def("layout_with_cuts", &layout_with_cuts, "layout"_a, "rectangles"_a,
             "The layout with cuts at the edges of these rectangles (tensor, row, column, rows, columns).");
  module.def("part_of", &part_of, "whole"_a, "sidecar"_a, "held"_a, "members"_a, "self"_a,
             "Layout and sidecar of the part that a trainer node holds: these rectangles of the whole layout. "
             "`members`: (name, endpoint) of all nodes, of which this is number `self`.");
  module.def("in_part", &in_part, "sidecar"_a, "layout"_a, "rectangles"_a,
             "Rectangles of the whole layout as those of the part's. OutOfRange: the part has not all of one.");
}

void bind_specs(nb::module_& module) {
  nb::class_<TensorSpec>(module, "TensorSpec", "One HF tensor as the user describes it.")
      .def(
          "__init__",
          [](TensorSpec* self, std::string name, const std::string& dtype, std::vector<std::uint64_t> shape,
             std::vector<std::uint64_t> row_cuts, std::vector<std::uint64_t> col_cuts) {
            new (self) TensorSpec(
                make_spec(std::move(name), dtype, std::move(shape), std::move(row_cuts), std::move(col_cuts)));
          },
          "name"_a, "dtype"_a, "shape"_a, "row_cuts"_a = std::vector<std::uint64_t>(),
          "col_cuts"_a = std::vector<std::uint64_t>(),
          "`dtype` as safetensors spells it (\"BF16\"). Cuts: rows and columns of the 2-D view where slices may begin.")
      .def_ro("name", &TensorSpec::name, "As the HF checkpoint has it.")
      .def_prop_ro(
          "dtype", [](const TensorSpec& spec) { return std::string(to_string(spec.dtype)); },
          "As safetensors spells it: \"BF16\".")
      .def_prop_ro(
          "shape", [](const TensorSpec& spec) { return nb::tuple(nb::cast(spec.shape)); },
          "Elements in each dimension.")
      .def_prop_ro(
          "row_cuts", [](const TensorSpec& spec) { return nb::tuple(nb::cast(spec.row_cuts)); },
          "Rows of the 2-D view where slices may begin.")
      .def_prop_ro(
          "col_cuts", [](const TensorSpec& spec) { return nb::tuple(nb::cast(spec.col_cuts)); },
          "Columns of the 2-D view where slices may begin.")
      .def("__eq__", [](const TensorSpec& a, const TensorSpec& b) { return a == b; });
  nb::class_<Tensor>(module, "Tensor", "A tensor of a layout, with all that follows from its spec.")
      .def_prop_ro(
          "spec", [](const Tensor& tensor) { return tensor.spec; }, "As the user described it.")
      .def_prop_ro(
          "name", [](const Tensor& tensor) { return tensor.spec.name; }, "As the HF checkpoint has it.")
      .def_prop_ro(
          "dtype", [](const Tensor& tensor) { return std::string(to_string(tensor.spec.dtype)); },
          "As safetensors spells it: \"BF16\".")
      .def_prop_ro(
          "shape", [](const Tensor& tensor) { return nb::tuple(nb::cast(tensor.spec.shape)); },
          "Elements in each dimension.")
      .def_ro("rows", &Tensor::rows, "Of the 2-D view: the product of all dimensions but the last.")
      .def_ro("cols", &Tensor::cols, "Of the 2-D view: the last dimension.")
      .def_ro("element_bytes", &Tensor::element_bytes, "Of one element of the 2-D view.")
      .def_ro("offset", &Tensor::offset, "Of its first byte in a half.")
      .def_ro("nbytes", &Tensor::bytes, "Rows × columns × element_bytes.")
      .def_ro("first_tile", &Tensor::first_tile, "Number of its first tile in the layout.")
      .def_ro("tile_count", &Tensor::tile_count, "0 for an empty tensor.");
}

}  // namespace

void bind_layout(nb::module_& module) {
  bind_specs(module);
  bind_parts(module);
  nb::class_<Layout>(module, "Layout",
                     "Which HF tensors a model has, in which order, and where each lies. Immutable; a sequence of "
                     "Tensor.")
      .def_static(
          "build", [](std::vector<TensorSpec> specs) { return unwrap(Layout::build(std::move(specs))); }, "specs"_a,
          "Of tensors in this order. InvalidArgument names the tensor that is wrong, or there twice.")
      .def_static(
          "decode", [](const nb::bytes& encoded) { return unwrap(Layout::decode(span_of(encoded))); }, "encoded"_a,
          "What encode() gave. CorruptData.")
      .def(
          "encode", [](const Layout& layout) { return to_bytes(layout.encode()); },
          "Its canonical bytes: equal layouts have equal ones.")
      .def_prop_ro(
          "digest", [](const Layout& layout) { return to_string(layout.digest()); }, "32 hex digits.")
      .def_prop_ro("half_bytes", &Layout::half_bytes, "Bytes of a whole version, padding included.")
      .def_prop_ro("model_bytes", &Layout::model_bytes, "Sum of the tensors' bytes.")
      .def_prop_ro("elements", &Layout::elements, "Of all tensors.")
      .def_prop_ro("tile_count", &Layout::tile_count, "Of all tensors.")
      .def(
          "find", [](const Layout& layout, const std::string& name) { return layout.find(name); }, "name"_a,
          "Its index, or None.")
      .def("__len__", [](const Layout& layout) { return layout.tensors().size(); })
      .def("__getitem__", &tensor_at, nb::rv_policy::reference_internal)
      .def(
          "__iter__",
          [](const Layout& layout) {
            return nb::make_iterator(nb::type<Layout>(), "_Iterator", layout.tensors().begin(), layout.tensors().end());
          },
          nb::keep_alive<0, 1>())
      .def(
          "names",
          [](const Layout& layout) {
            nb::list names;
            for (const Tensor& tensor : layout.tensors()) names.append(nb::cast(tensor.spec.name));
            return names;
          },
          "Of all tensors, in layout order.");
  nb::class_<Sidecar>(module, "Sidecar", "What a HF directory has beside its tensors' bytes.")
      .def_static("make", &make_named_sidecar, "layout"_a, "file"_a = "model.safetensors", "others"_a = nb::dict(),
                  "One safetensors file with all tensors, and other files (name: bytes) beside it.")
      .def_static(
          "decode",
          [](const nb::bytes& encoded, const Layout& layout) {
            return unwrap(Sidecar::decode(span_of(encoded), layout));
          },
          "encoded"_a, "layout"_a, "What encode() gave, of a sidecar of this layout. CorruptData.")
      .def(
          "encode", [](const Sidecar& sidecar) { return to_bytes(sidecar.encode()); }, "As bytes, for decode().")
      .def_prop_ro(
          "others",
          [](const Sidecar& sidecar) {
            nb::dict others;
            for (const auto& file : sidecar.others) others[nb::cast(file.name)] = to_bytes(file.bytes);
            return others;
          },
          "Files that hold no tensors, name: bytes.")
      .def_prop_ro(
          "weight_files",
          [](const Sidecar& sidecar) {
            nb::list names;
            for (const auto& file : sidecar.weights) names.append(nb::cast(file.name));
            return names;
          },
          "Names of the files that hold the tensors.");
  module.def(
      "read_hf_directory",
      [](const std::filesystem::path& directory, std::uint64_t tensor_parallel) {
        const HfModel model = unwrap(released([&] { return HfModel::open(directory, tensor_parallel); }));
        return nb::make_tuple(std::const_pointer_cast<Layout>(model.layout()), model.sidecar());
      },
      "directory"_a, "tensor_parallel"_a = 1, "Layout and sidecar of a HF model directory; reads no weights.");
  module.def(
      "even_cuts",
      [](std::vector<TensorSpec> specs, std::uint64_t parts) {
        if (parts == 0) throw Failure{Error(Errc::invalid_argument, "even_cuts: into 0 parts")};
        add_even_cuts(specs, parts);
        return specs;
      },
      "specs"_a, "parts"_a, "Cuts for as many tensor-parallel ranks.");
  module.def(
      "dtype_bytes", [](const std::string& name) { return dtype_bytes(dtype_named(name)); }, "dtype"_a);
}

}  // namespace deltasync::python
