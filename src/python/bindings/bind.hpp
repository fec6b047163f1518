// The parts of the module, each in a file of its name.
#pragma once

#include <nanobind/nanobind.h>

namespace deltasync::python {

void bind_layout(nanobind::module_& module);
void bind_version(nanobind::module_& module);
void bind_writer(nanobind::module_& module);
void bind_placement(nanobind::module_& module);
void bind_receiver(nanobind::module_& module);
void bind_bucket(nanobind::module_& module);
void bind_commit(nanobind::module_& module);
void bind_control(nanobind::module_& module);
void bind_export(nanobind::module_& module);
void bind_timeline(nanobind::module_& module);

}  // namespace deltasync::python
