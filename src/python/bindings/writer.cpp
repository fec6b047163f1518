#include "deltasync/writer.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <vector>

#include "python/bindings/batch.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"
#include "python/bindings/plain.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

std::unique_ptr<Writer> attach(std::shared_ptr<const Layout> layout, const Sidecar& sidecar, std::string socket,
                               std::uint32_t index, std::uint32_t writers, unsigned threads, std::string name,
                               double timeout) {
  WriterOptions options;
  options.agent_socket = std::move(socket);
  options.writer_index = index;
  options.writers = writers;
  options.threads = threads;
  options.name = std::move(name);
  options.device_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(limit_of(timeout));
  return unwrap(stoppable_until(
      timeout, [&](const CallOptions& call) { return Writer::attach(layout, sidecar, options, call); }));
}

void bind_report(nb::module_& module) {
  nb::class_<OffloadReport>(module, "OffloadReport", "What one version cost the trainer. Times in seconds.")
      .def_ro("version", &OffloadReport::version)
      .def_ro("guard_s", &OffloadReport::guard_s, "Waiting until the inactive half was free.")
      .def_ro("copy_s", &OffloadReport::copy_s)
      .def_ro("seal_s", &OffloadReport::seal_s)
      .def_ro("total_s", &OffloadReport::total_s)
      .def_ro("nbytes", &OffloadReport::bytes)
      .def_ro("tensors", &OffloadReport::tensors)
      .def_ro("copy_form", &OffloadReport::copy_form,
              "How long runs of host memory are copied, once that was chosen by speed: in the third version or later. "
              "Else empty.")
      .def("__repr__", [](const OffloadReport& report) {
        return "<deltasync.OffloadReport " + to_string(report.version) + ", " + std::to_string(report.bytes) +
               " bytes in " + std::to_string(report.total_s) + " s>";
      });
}

/// A writer takes one call at a time, and a handler of a signal runs in the middle of one.
class CallOf {
 public:
  explicit CallOf(const Writer& writer) : writer_(&writer), alone_(std::ranges::count(under_way(), writer_) == 0) {
    if (alone_) under_way().push_back(writer_);
  }
  ~CallOf() {
    if (alone_) std::erase(under_way(), writer_);
  }
  CallOf(const CallOf&) = delete;
  CallOf& operator=(const CallOf&) = delete;
  bool alone() const { return alone_; }
  void check() const {
    if (!alone_) throw Failure{Error(Errc::invalid_argument, "another call of this writer is under way")};
  }

 private:
  static std::vector<const Writer*>& under_way() {  // protected by the GIL
    static std::vector<const Writer*> writers;
    return writers;
  }

  const Writer* writer_;
  const bool alone_;
};

/// A call of the writer that signals end.
template <class F>
auto stoppable_by(Writer& writer, double timeout, F&& call) {
  const CallOf one(writer);
  one.check();
  return stoppable_until(timeout, std::forward<F>(call));
}

VersionId newest(const Writer& writer) {
  const CallOf one(writer);
  one.check();
  return writer.newest();
}

std::uint64_t fresh_epoch(const Writer& writer) {
  const CallOf one(writer);
  one.check();
  return writer.fresh_epoch();
}

/// Handlers of signals get their turn after so many bytes.
constexpr std::uint64_t kSignalBytes = 256u << 20;

void write_batch(Writer& writer, const Batch& batch, bool wait, double timeout) {
  const CallOf one(writer);
  one.check();
  if (wait || !batch.on_device()) {
    const auto tensors = writer.layout()->tensors();
    for (auto rest = batch.slices(); !rest.empty();) {
      std::size_t slices = 0;
      for (std::uint64_t bytes = 0; slices < rest.size() && bytes < kSignalBytes; ++slices) {
        const auto& [tensor, rect] = rest[slices].slice;
        if (tensor < tensors.size()) bytes += rect.elements() * tensors[tensor].element_bytes;
      }
      unwrap(released([&] { return writer.write(rest.first(slices)); }));
      check_signals();
      rest = rest.subspan(slices);
    }
    return;
  }
  const CallOptions call = options_after(timeout);
  unwrap(released([&]() -> Status {
    std::vector<SliceSource> host;
    std::vector<SliceSource> device;
    for (const SliceSource& item : batch.slices()) {
      (item.source.device.is_host() ? host : device).push_back(item);
    }
    DS_TRY(writer.write(host));
    auto queued = writer.write_device(device, call);
    return queued ? Status() : Status(std::move(queued).error());
  }));
}

/// Below, a copy takes less time than another thread would need for its turn.
constexpr std::size_t kReleaseBytesMin = 64u << 10;

/// Writes plain tensors one by one, each before the next pair is asked for.
OddPairs write_plain(Writer& writer, PlainTensors& plain, const nb::object& pairs) {
  return OddPairs(plain, nb::iter(pairs), [&writer](const SliceSource& item, nb::handle) {
    const CallOf one(writer);
    one.check();
    const auto write = [&] { return writer.write(item.slice.tensor, item.slice.rect, item.source); };
    const std::uint64_t bytes = writer.layout()->tensors()[item.slice.tensor].bytes;
    if (bytes < kReleaseBytesMin) return unwrap(write());
    unwrap(released(write));
    check_signals();
  });
}

}  // namespace

void bind_writer(nb::module_& module) {
  bind_batch(module);
  bind_plain(module);
  bind_report(module);
  nb::class_<Writer>(module, "Writer", "One writer process's session with the agent. One thread calls it at a time.")
      .def_static("attach", &attach, "layout"_a, "sidecar"_a, "socket"_a, "index"_a = 0, "writers"_a = 1,
                  "threads"_a = 0, "name"_a = "trainer", "timeout"_a = 60.0)
      .def(
          "register_plan",
          [](Writer& writer, const Batch& batch, double timeout) {
            const auto plan = batch.plan();
            unwrap(stoppable_by(writer, timeout,
                                [&](const CallOptions& call) { return writer.register_plan(plan, call); }));
          },
          "batch"_a, "timeout"_a = 60.0)
      .def(
          "begin",
          [](Writer& writer, const Version& version, double timeout) {
            unwrap(stoppable_by(writer, timeout, [&](const CallOptions& call) { return writer.begin(version, call); }));
          },
          "version"_a, "timeout"_a = 60.0)
      .def("write_batch", &write_batch, "batch"_a, "wait"_a = true, "timeout"_a = 60.0,
           "Sources on a device may be reused after it, too; without `wait` only after commit().")
      .def("write_plain", &write_plain, "plain"_a, "pairs"_a, nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(),
           "Writes the plain ones, each before the next is asked for; an iterator of the others.")
      .def(
          "commit",
          [](Writer& writer, double timeout) {
            return unwrap(stoppable_by(writer, timeout, [&](const CallOptions& call) { return writer.commit(call); }));
          },
          "timeout"_a = 60.0)
      .def(
          "abort",
          [](Writer& writer) {
            const CallOf one(writer);
            if (one.alone()) released([&] { writer.abort(); });
          },
          "Nothing while another call is under way, which aborts by itself if it fails.")
      .def(
          "wait_ready",
          [](Writer& writer, const Version& version, double timeout) {
            unwrap(stoppable_by(writer, timeout,
                                [&](const CallOptions& call) { return writer.wait_ready(version.id, call); }));
          },
          "version"_a, "timeout"_a = 60.0)
      .def("fresh_epoch", &fresh_epoch,
           "An epoch for a trainer that begins now, after all that the agent has heard of. One rank calls it and hands "
           "it "
           "to all others.")
      .def_prop_ro("newest_number", [](const Writer& writer) { return newest(writer).number; })
      .def_prop_ro("newest_epoch", [](const Writer& writer) { return newest(writer).epoch; })
      .def_prop_ro("layout", [](const Writer& writer) { return std::const_pointer_cast<Layout>(writer.layout()); });
}

}  // namespace deltasync::python
