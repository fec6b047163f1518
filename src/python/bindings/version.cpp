#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include "deltasync/version.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {

using namespace nb::literals;

void bind_version(nb::module_& module) {
  nb::class_<Version>(module, "Version",
                      "A model version. `epoch` names an incarnation of the trainer; a later one has a larger epoch as "
                      "far as its agent has heard of the earlier. `number` grows within it; `label` is the user's name "
                      "for it. Ordered by (epoch, number).")
      .def(
          "__init__",
          [](Version* self, std::uint64_t epoch, std::uint64_t number, std::string label) {
            new (self) Version{{epoch, number}, std::move(label)};
          },
          "epoch"_a, "number"_a, "label"_a = "")
      .def_prop_ro(
          "epoch", [](const Version& version) { return version.id.epoch; }, "One incarnation of a trainer.")
      .def_prop_ro(
          "number", [](const Version& version) { return version.id.number; }, "Grows within the epoch.")
      .def_ro("label", &Version::label, "The user's name for it; may be empty.")
      .def_prop_ro(
          "id", [](const Version& version) { return to_string(version.id); }, "\"EPOCH:NUMBER\", epoch in hex.")
      .def("__str__", [](const Version& version) { return to_string(version); })
      .def("__repr__", [](const Version& version) { return "<deltasync.Version " + to_string(version) + ">"; })
      .def(
          "__eq__", [](const Version& a, const Version& b) { return a == b; }, nb::is_operator())
      .def(
          "__lt__", [](const Version& a, const Version& b) { return a.id < b.id; }, nb::is_operator())
      .def("__hash__",
           [](const Version& version) {
             return static_cast<std::int64_t>((version.id.epoch * 0x9e3779b97f4a7c15ULL ^ version.id.number) >> 1);
           })
      .def("__reduce__", [](const Version& version) {  // versions go between the processes of a job
        return nb::make_tuple(nb::type<Version>(), nb::make_tuple(version.id.epoch, version.id.number, version.label));
      });
  module.def("make_epoch", &make_epoch, "after"_a = 0,
             "A fresh epoch that comes after another one. Trainers use Writer.fresh_epoch().");
}

}  // namespace deltasync::python
