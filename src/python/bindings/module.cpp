// deltasync._native: the C++ library as Python sees it. Thin on purpose: what makes it pleasant is written in Python.

#include "python/bindings/bind.hpp"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>

#include "base/log.hpp"
#include "net/auth.hpp"
#include "python/bindings/calls.hpp"

NB_MODULE(_native, module) {
  using namespace deltasync::python;
  module.doc() = "The C++ library. Use the package `deltasync`; nothing here is stable.";
  register_failures(module);
  bind_layout(module);
  bind_version(module);
  bind_writer(module);
  bind_placement(module);
  bind_export(module);
  bind_receiver(module);
  bind_bucket(module);
  bind_commit(module);
  bind_timeline(module);
  bind_control(module);
  module.def(
      "init_log", [](const std::string& name, const std::string& level) { deltasync::init_log(name, level); },
      nb::arg("name"), nb::arg("level"),
      "Log lines of the library go to stderr from now on: trace, debug, info, warn, error or off.");
  module.def(
      "read_token_file",
      [](const std::filesystem::path& file) { return unwrap(deltasync::net::read_token_file(file)); }, nb::arg("file"),
      "The secret in a file that belongs to this user (or root) and that nobody else may touch, without the white "
      "space "
      "around it. NotFound, PermissionDenied, InvalidArgument (too short, too long, no regular file).");
  module.attr("version") = DELTASYNC_VERSION;
  module.attr("with_cuda") = static_cast<bool>(DELTASYNC_CUDA);
}
