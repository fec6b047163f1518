// The control service, with an engine and weights that are Python objects (deltasync/control.py).

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/deadline.hpp"
#include "base/fork_guard.hpp"
#include "deltasync/control.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"
#include "receiver/control/call.hpp"
#include "receiver/control/server.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;
using control::EngineWeights;
using control::UpdateRequest;

/// How often a wait of the engine looks whether it shall end.
constexpr auto kLook = std::chrono::milliseconds(500);

double seconds_left(const CallOptions& call) {
  return std::chrono::duration<double>(Deadline::of(call).remaining()).count();
}

/// What a Python exception is to clients.
Errc code_of(nb::python_error& error) {
  if (error.matches(PyExc_TimeoutError)) return Errc::timed_out;
  return error.matches(PyExc_NotImplementedError) ? Errc::unsupported : Errc::internal;
}

/// The receiver's errors are of deltasync.errors, and have a code of their own.
Errc code_of_receiver(nb::python_error& error) {
  if (!error.matches(nb::module_::import_("deltasync.errors").attr("Error"))) return code_of(error);
  const std::string name = nb::cast<std::string>(error.value().attr("code"));
  for (int code = 0; code <= static_cast<int>(Errc::cancelled); ++code) {
    if (to_string(static_cast<Errc>(code)) == name) return static_cast<Errc>(code);
  }
  return Errc::internal;
}

/// Calls a Python object's method on a thread of the service: with the GIL, and what it raises becomes an error.
template <class F>
auto call_python(F&& call, Errc (*code)(nb::python_error&) = code_of) -> decltype(call()) {
  const nb::gil_scoped_acquire gil;
  try {
    return call();
  } catch (nb::python_error& error) {
    const std::string said = nb::cast<std::string>(nb::str(error.value()));
    const std::string type = nb::cast<std::string>(error.type().attr("__name__"));
    return Error(code(error), type + ": " + said);
  } catch (const std::exception& error) {
    return Error(Errc::internal, error.what());
  }
}

/// Holds the Python object without counting it: the server keeps it (keep_alive).
class PythonEngine final : public RolloutEngine {
 public:
  explicit PythonEngine(nb::handle engine) : engine_(engine) {}

  Status stop_admission() override { return plain("stop_admission"); }
  Status resume_admission() override { return plain("resume_admission"); }
  Result<std::uint64_t> abort(std::span<const std::string> ids) override {
    return call_python([&]() -> Result<std::uint64_t> {
      nb::list listed;
      for (const std::string& id : ids) listed.append(nb::str(id.c_str(), id.size()));
      return nb::cast<std::uint64_t>(done("abort", engine_.attr("abort")(listed)));
    });
  }
  /// In short waits, so that each ends when the service does.
  Status wait_idle(const CallOptions& call) override {
    for (;;) {
      const auto began = std::chrono::steady_clock::now();
      CallOptions some = call;
      some.deadline = std::min(call.deadline, began + kLook);
      Status waited = timed("wait_idle", some);
      if (waited || waited.error().code() != Errc::timed_out) return waited;
      if (call.stop.stop_requested()) return Error(Errc::cancelled, "the control service ends");
      const bool raised_at_once = std::chrono::steady_clock::now() < began + (some.deadline - began) / 2;
      if (raised_at_once || std::chrono::steady_clock::now() >= call.deadline) return waited;
    }
  }
  bool can_hold() const override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<bool>(engine_.attr("can_hold"));
  }
  Status hold(const CallOptions& call) override { return timed("hold", call); }
  Status release_hold() override { return plain("release_hold"); }
  Status reset_caches(const CallOptions& call) override { return timed("reset_caches", call); }
  Status pause_transfer() override { return plain("pause_transfer"); }
  Status resume_transfer() override { return plain("resume_transfer"); }
  Status release_memory(EngineMemory memory) override { return of_memory("release_memory", memory); }
  Status restore_memory(EngineMemory memory) override { return of_memory("restore_memory", memory); }

 private:
  /// A coroutine has not even begun, and nobody here awaits it.
  static nb::object done(const char* what, nb::object returned) {
    if (!nb::hasattr(returned, "__await__")) return returned;
    throw std::invalid_argument(std::string(what) +
                                "() returned an awaitable, which nobody awaits: it has to return "
                                "when what it does is done");
  }
  Status plain(const char* what) {
    return call_python([&]() -> Status {
      done(what, engine_.attr(what)());
      return {};
    });
  }
  Status timed(const char* what, const CallOptions& call) {
    return call_python([&]() -> Status {
      done(what, engine_.attr(what)(seconds_left(call)));
      return {};
    });
  }
  Status of_memory(const char* what, EngineMemory memory) {
    return call_python([&]() -> Status {
      const std::string_view name = control::to_string(memory);
      done(what, engine_.attr(what)(nb::str(name.data(), name.size())));
      return {};
    });
  }

  const nb::handle engine_;
};

class PythonWeights final : public EngineWeights {
 public:
  explicit PythonWeights(nb::handle weights) : weights_(weights) {}

  Status stage(const UpdateRequest& request, const CallOptions& call) override {
    return call_python(
        [&]() -> Status {
          weights_.attr("stage")(request.version, request.directory, request.verify, seconds_left(call));
          return {};
        },
        code_of_receiver);
  }
  Status commit(const CallOptions& call) override { return timed("commit", call); }
  Status release(const CallOptions& call) override { return timed("release", call); }
  Status fill(const CallOptions& call) override { return timed("fill", call); }
  bool stages_in_place() const override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<bool>(weights_.attr("stages_in_place"));
  }
  std::optional<Version> current() const override {
    const nb::gil_scoped_acquire gil;
    const nb::object version = weights_.attr("current")();
    if (version.is_none()) return std::nullopt;
    return nb::cast<Version>(version);
  }
  std::vector<std::pair<std::string, std::string>> live_names() const override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<std::vector<std::pair<std::string, std::string>>>(weights_.attr("live_names")());
  }

 private:
  Status timed(const char* what, const CallOptions& call) {
    return call_python(
        [&]() -> Status {
          weights_.attr(what)(seconds_left(call));
          return {};
        },
        code_of_receiver);
  }

  const nb::handle weights_;
};

class PythonControl {
 public:
  PythonControl(ControlOptions options, nb::handle engine, nb::handle weights) : engine_(engine) {
    server_ = unwrap(released(
        [&] { return control::start_server(std::move(options), engine_, std::make_unique<PythonWeights>(weights)); }));
  }
  ~PythonControl() { close(); }  // in a forked child too, whose Python collects what the parent made
  PythonControl(const PythonControl&) = delete;
  PythonControl& operator=(const PythonControl&) = delete;

  std::string endpoint() const { return server_ ? server_->endpoint() : std::string(); }
  std::pair<Version, std::string> admit(const std::string& min_version, const std::string& exact_version) const {
    if (!server_) throw Failure{Error(Errc::invalid_argument, "admit: the control service is closed")};
    const std::shared_lock lock(admits_);
    return unwrap(released([&, server = server_.get()] { return server->admit(min_version, exact_version); }));
  }
  bool in_hook() const { return server_ && server_->in_hook(); }
  void stop() {
    if (server_ && fork_guard_.same_process()) server_->stop();
  }
  /// Not beside close().
  void check() {
    if (!server_) return;
    unwrap(released([&] { return server_->check(); }));
  }
  /// Waits for the hooks that run and for each admit(), which want the GIL; a later admit() finds no server. In a
  /// forked child, where there are neither its threads nor a connection of its own, nothing.
  void close() {
    if (!fork_guard_.same_process()) {
      static_cast<void>(server_.release());
      return;
    }
    released([&, server = std::move(server_)]() mutable {
      { const std::unique_lock lock(admits_); }
      server.reset();
    });
  }

 private:
  PythonEngine engine_;
  std::unique_ptr<control::StoppableServer> server_;  // protected by the GIL
  mutable std::shared_mutex admits_;                  // shared: an admit() is under way
  const ForkGuard fork_guard_;
};

}  // namespace

void bind_control(nb::module_& module) {
  nb::class_<VersionSpans>(
      module, "VersionSpans",
      "Which versions computed an answer whose request was held during an update: one object for each request. An "
      "engine asks\n:meth:`RolloutControl.admit` for what is live when a forward pass begins; no commit comes before "
      "the "
      "pass has ended.")
      .def(nb::init<>())
      .def("computed", &VersionSpans::computed, "version"_a, "tokens"_a = 1,
           "The answer's next tokens, so many, are this version's.")
      .def_prop_ro(
          "list", &VersionSpans::list,
          "Of each run of tokens of one version, in order: (the version's name, its first token, the one behind "
          "its last).");
  nb::class_<PythonControl>(module, "ControlServer", "See deltasync.RolloutControl.")
      .def(
          "__init__",
          [](PythonControl* made, nb::handle engine, nb::handle weights, std::string listen, std::string token,
             TlsOptions tls, std::vector<std::string> dialects, std::string model, std::uint32_t world_size,
             std::uint32_t pp_size, std::uint32_t ep_size, std::string engine_info, double call_s,
             bool graphs_use_kv_cache) {
            ControlOptions options;
            options.listen = std::move(listen);
            options.token = std::move(token);
            options.tls = std::move(tls);
            options.dialects = std::move(dialects);
            options.model = std::move(model);
            options.world_size = world_size;
            options.pp_size = pp_size;
            options.ep_size = ep_size;
            options.engine_info = std::move(engine_info);
            options.call_s = call_s;
            options.graphs_use_kv_cache = graphs_use_kv_cache;
            new (made) PythonControl(std::move(options), engine, weights);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "engine"_a, "weights"_a, "listen"_a, "token"_a, "tls"_a,
          "dialects"_a, "model"_a, "world_size"_a, "pp_size"_a, "ep_size"_a, "engine_info"_a, "call_s"_a,
          "graphs_use_kv_cache"_a)
      .def_prop_ro("endpoint", &PythonControl::endpoint)
      .def("admit", &PythonControl::admit, "min_version"_a, "exact_version"_a)
      .def_prop_ro("in_hook", &PythonControl::in_hook)
      .def("stop", &PythonControl::stop)
      .def("check", &PythonControl::check)
      .def("close", &PythonControl::close);
}

}  // namespace deltasync::python
