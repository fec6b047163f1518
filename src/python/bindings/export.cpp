#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "export/plan.hpp"
#include "export/rectangles.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;
using exporting::Family;

/// A copy with its row by name.
struct PlannedCopy : ExportCopy {
  std::string label;
};

std::vector<std::uint64_t> of_steps(const ExportCopy& copy, std::uint64_t CopyStep::*member) {
  std::vector<std::uint64_t> out;
  for (const CopyStep& step : copy.steps) out.push_back(step.*member);
  return out;
}

std::vector<PlannedCopy> copies_of(const ExportPlan& plan) {
  std::vector<PlannedCopy> out;
  out.reserve(plan.copies.size());
  for (const ExportCopy& copy : plan.copies) {
    PlannedCopy& planned = out.emplace_back();
    static_cast<ExportCopy&>(planned) = copy;
    planned.label = plan.rows[copy.row];
  }
  return out;
}

using Numbers = std::vector<std::uint64_t>;

PlannedCopy make_copy(const Numbers& counts, const Numbers& sources, const Numbers& targets, std::uint64_t from,
                      std::uint64_t to, double add, std::uint32_t tensor, std::uint32_t piece, std::string row) {
  if (counts.size() != sources.size() || counts.size() != targets.size()) {
    throw nb::value_error("ExportCopy: as many strides as counts");
  }
  PlannedCopy copy;
  copy.tensor = tensor;
  copy.piece = piece;
  copy.source_offset = from;
  copy.target_offset = to;
  copy.add = add;
  copy.label = std::move(row);
  for (std::size_t i = 0; i < counts.size(); ++i) copy.steps.push_back({counts[i], sources[i], targets[i]});
  return copy;
}

/// tensor; row, column, rows, columns; of each run piece, offset, row stride, column stride; add.
using PlainRun = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using PlainRect = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using PlainRectangle = std::tuple<std::uint32_t, PlainRect, std::vector<PlainRun>, double>;

std::vector<PlainRectangle> rectangles(const std::vector<PlannedCopy>& planned, std::uint64_t cols,
                                       const std::string& what, std::size_t most) {
  const std::vector<ExportCopy> copies(planned.begin(), planned.end());
  const exporting::Rectangles found = exporting::rectangles_of(copies, cols, most);
  if (found.apart != nullptr) {
    const std::string& row = planned[static_cast<std::size_t>(found.apart - copies.data())].label;
    throw Failure{Error(Errc::unsupported, what + ": row " + row +
                                               " of the page moves elements one by one, which direct export does "
                                               "not do")};
  }
  std::vector<PlainRectangle> out;
  out.reserve(found.made.size());
  for (const auto& [tensor, rect, runs, add] : found.made) {
    std::vector<PlainRun> plain;
    for (const exporting::Run& run : runs) plain.emplace_back(run.piece, run.offset, run.row_stride, run.col_stride);
    out.emplace_back(tensor, PlainRect{rect.row, rect.col, rect.rows, rect.cols}, std::move(plain), add);
  }
  return out;
}

ExportPlan make_plan(const std::vector<Family>& families, const std::string& config,
                     const std::shared_ptr<Layout>& layout, const std::vector<std::string>& shards,
                     const std::vector<std::string>& ignored) {
  return unwrap(released([&]() -> Result<ExportPlan> {
    DS_ASSIGN(const std::vector<std::string> architectures, exporting::architectures_of(config));
    DS_ASSIGN(const Family family, exporting::find_family(families, architectures));
    std::vector<std::vector<ShardPiece>> pieces(shards.size());
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
      DS_ASSIGN(auto shard, exporting::parse_shard(shards[rank], "rank " + std::to_string(rank)));
      pieces[rank] = std::move(shard.second);
    }
    return exporting::plan_export(family, config, layout, pieces, ignored);
  }));
}

}  // namespace

void bind_export(nb::module_& module) {
  nb::class_<Family>(module, "Family", "A page that says how a family's tensors become those of a model directory.")
      .def_static(
          "parse",
          [](const std::string& toml, const std::string& file) { return unwrap(exporting::parse_family(toml, file)); },
          "toml"_a, "file"_a = "page", "file: for messages.")
      .def_ro("name", &Family::name)
      .def_ro("architectures", &Family::architectures, "Of config.json, that it is for.")
      .def_ro("inherits", &Family::inherits, "The page whose rows follow; empty: none.")
      .def("__repr__", [](const Family& family) { return "<Family " + family.name + ">"; });
  module.def(
      "builtin_families",
      [] {
        std::vector<std::pair<std::string, std::string>> out;
        for (const auto& [name, text] : exporting::builtin_families()) out.emplace_back(name, text);
        return out;
      },
      "File name and text of the pages that come along.");
  nb::class_<PlannedCopy>(module, "ExportCopy",
                          "Elements of a piece of a rank that are elements of a tensor. Offsets and strides are in "
                          "elements: of the piece, without gaps, and of the whole tensor.")
      .def(nb::new_(&make_copy), "counts"_a, "source_strides"_a, "target_strides"_a, "source_offset"_a = 0,
           "target_offset"_a = 0, "add"_a = 0.0, "tensor"_a = 0, "piece"_a = 0, "row"_a = "")
      .def_ro("tensor", &PlannedCopy::tensor, "Index in the layout.")
      .def_ro("rank", &PlannedCopy::rank)
      .def_ro("piece", &PlannedCopy::piece, "Index of those that the rank gave.")
      .def_prop_ro("counts", [](const PlannedCopy& copy) { return of_steps(copy, &CopyStep::count); })
      .def_prop_ro("source_strides", [](const PlannedCopy& copy) { return of_steps(copy, &CopyStep::source_stride); })
      .def_prop_ro("target_strides", [](const PlannedCopy& copy) { return of_steps(copy, &CopyStep::target_stride); })
      .def_ro("source_offset", &PlannedCopy::source_offset)
      .def_ro("target_offset", &PlannedCopy::target_offset)
      .def_ro("add", &PlannedCopy::add, "To each value.")
      .def_ro("row", &PlannedCopy::label, "The page's row: name and line.");
  nb::class_<QuantisedTensor>(module, "QuantisedTensor",
                              "A tensor of codes. Copies to it have the values, which are quantised block by block.")
      .def_ro("tensor", &QuantisedTensor::tensor, "Index in the layout.")
      .def_ro("scale", &QuantisedTensor::scale, "Index of the tensor with its scales.")
      .def_ro("by_block", &QuantisedTensor::by_block, "Or it has one scale, by another formula.")
      .def_ro("block_rows", &QuantisedTensor::block_rows)
      .def_ro("block_cols", &QuantisedTensor::block_cols)
      .def_ro("powers_of_two", &QuantisedTensor::powers_of_two, "Its scales are.");
  nb::class_<ExportPlan>(module, "ExportPlan", "What all ranks write of a model's tensors.")
      .def_prop_ro("layout", [](const ExportPlan& plan) { return std::const_pointer_cast<Layout>(plan.layout); })
      .def_ro("family", &ExportPlan::family)
      .def_prop_ro("copies", &copies_of, "Sorted by tensor and place in it.")
      .def_ro("quantised", &ExportPlan::quantised)
      .def_ro("constants", &ExportPlan::constants, "Layout indices of tensors that have the model directory's bytes.")
      .def_ro("ignored", &ExportPlan::ignored, "Tensors of the trainer that go nowhere.")
      .def("to_json", [](const ExportPlan& plan) { return exporting::to_json(plan); });
  module.def(
      "export_rectangles", &rectangles, "copies"_a, "cols"_a, "what"_a, "most"_a = exporting::kRectanglesMax,
      "Of copies to one tensor, which has so many columns: (tensor, (row, col, rows, cols), [(piece, offset, row "
      "stride, column stride), …], add). Unsupported: more than `most` of one copy; names `what`.");
  module.def(
      "plan_export", &make_plan, "families"_a, "config"_a, "layout"_a, "shards"_a,
      "ignored"_a = std::vector<std::string>(),
      "families: pages of the user's own, before those that come along; config: the text of config.json; shards: "
      "a JSON text for each rank.");
}

}  // namespace deltasync::python
