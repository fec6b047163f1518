// One rank's group commit, for engines/group.py, which runs it over a store of torch.distributed.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "commit/machine.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {

using namespace nb::literals;
using commit::Action;
using commit::Machine;
using commit::Report;
using commit::Vote;

void bind_commit(nb::module_& module) {
  nb::class_<Vote>(module, "GroupVote", "A rank's vote; `reason`: why it votes no, or None.")
      .def(
          "__init__",
          [](Vote* self, std::optional<std::string> reason, std::string subject, std::string doubt, std::string lacks) {
            new (self) Vote{std::move(reason), std::move(subject), std::move(doubt), std::move(lacks)};
          },
          "reason"_a.none(), "subject"_a = "", "doubt"_a = "", "lacks"_a = "");
  nb::class_<Action>(module, "GroupAction", "What is to be done next.")
      .def_prop_ro("kind", [](const Action& action) { return commit::to_string(action.kind); })
      .def_ro("registers", &Action::registers)
      .def_ro("value", &Action::value);
  nb::class_<Report>(module, "GroupReport", "How a vote or an update has ended.")
      .def_prop_ro("ending", [](const Report& report) { return commit::to_string(report.ending); })
      .def_prop_ro("outcome", [](const Report& report) { return commit::to_string(report.verdict.outcome); })
      .def_prop_ro("reason", [](const Report& report) { return report.verdict.reason; })
      .def_prop_ro("doubt", [](const Report& report) { return report.verdict.doubt; })
      .def_ro("text", &Report::text);
  nb::class_<Machine>(module, "GroupCommit", "src/commit/machine.hpp: actions, and the events that answer them.")
      .def(nb::init<std::uint32_t, std::uint32_t>(), "rank"_a, "ranks"_a)
      .def("vote", &Machine::vote, "vote"_a, "at"_a = "")
      .def("update", &Machine::update, "staged"_a, "at"_a = "")
      .def_prop_ro("action", [](const Machine& machine) { return machine.action(); })
      .def_prop_ro("report", [](const Machine& machine) { return machine.report(); })
      .def("found", &Machine::found, "values"_a)
      .def("absent", &Machine::absent)
      .def("stands", &Machine::stands, "value"_a)
      .def("failed", &Machine::failed, "why"_a)
      .def("go_on", &Machine::go_on, "late"_a)
      .def("worded", &Machine::worded, "text"_a)
      .def("committed", &Machine::committed, "problem"_a.none())
      .def("rolled_back", &Machine::rolled_back, "doubts"_a)
      .def("voided", &Machine::voided, "doubts"_a)
      .def("interrupted", &Machine::interrupted);
}

}  // namespace deltasync::python
