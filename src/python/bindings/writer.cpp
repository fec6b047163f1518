#include "deltasync/writer.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <set>

#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

/// Slices and the addresses of their bytes, collected in Python and written by one call. Owns no source.
class Batch {
 public:
  void add(std::uint32_t tensor, std::uint64_t row, std::uint64_t col, std::uint64_t rows, std::uint64_t cols,
           std::uintptr_t address, std::size_t row_stride_bytes, int device, std::uintptr_t stream) {
    Source source;
    source.data = reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
    source.row_stride_bytes = row_stride_bytes;
    if (device >= 0) {
      source.memory = Source::Memory::cuda;
      source.device = device;
      source.stream = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
      on_device_ = true;
    }
    slices_.push_back({{tensor, {row, col, rows, cols}}, source});
  }

  /// Whole tensors of the layout, whose rows lie one behind the other in host memory.
  void add_whole(const Layout& layout, const nb::list& tensors, const nb::list& addresses) {
    if (tensors.size() != addresses.size()) {
      throw Failure{Error(Errc::invalid_argument, std::to_string(addresses.size()) + " addresses for " +
                                                      std::to_string(tensors.size()) + " tensors")};
    }
    slices_.reserve(slices_.size() + tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::uint64_t index = integer(tensors[i]);
      if (index >= layout.tensors().size()) throw Failure{Error(Errc::out_of_range, "tensor " + std::to_string(index))};
      const Tensor& tensor = layout.tensors()[index];
      Source source;
      source.data = reinterpret_cast<const void*>(integer(addresses[i]));  // NOLINT(performance-no-int-to-ptr)
      slices_.push_back({{static_cast<std::uint32_t>(index), {0, 0, tensor.rows, tensor.cols}}, source});
    }
  }

  void clear() {
    slices_.clear();
    on_device_ = false;
  }
  std::size_t size() const { return slices_.size(); }
  bool on_device() const { return on_device_; }
  std::span<const SliceSource> slices() const { return slices_; }
  std::vector<TensorSlice> plan() const {
    std::vector<TensorSlice> plan;
    plan.reserve(slices_.size());
    for (const SliceSource& item : slices_) plan.push_back(item.slice);
    return plan;
  }

 private:
  static std::uint64_t integer(const nb::handle& value) {
    const auto number = PyLong_AsUnsignedLongLong(value.ptr());
    if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw nb::python_error();
    return number;
  }

  std::vector<SliceSource> slices_;
  bool on_device_ = false;
};

std::unique_ptr<Writer> attach(std::shared_ptr<const Layout> layout, const Sidecar& sidecar, std::string socket,
                               std::uint32_t index, std::uint32_t writers, unsigned threads, std::string name,
                               double timeout) {
  WriterOptions options;
  options.agent_socket = std::move(socket);
  options.writer_index = index;
  options.writers = writers;
  options.threads = threads;
  options.name = std::move(name);
  const Deadline deadline = deadline_after(timeout);
  for (;;) {
    // An attempt with a short deadline names what it waited for as a longer one does.
    auto writer = released([&] {
      return Writer::attach(layout, sidecar, options, deadline.earlier(Deadline::after(std::chrono::seconds(1))));
    });
    const bool again = !writer.ok() && !deadline.passed() &&
                       (writer.error().code() == Errc::connection || writer.error().code() == Errc::timed_out);
    if (!again) return unwrap(std::move(writer));
    check_signals();
  }
}

void bind_batch(nb::module_& module) {
  nb::class_<Batch>(module, "Batch", "Slices and the addresses of their bytes, for Writer.write_batch. Owns no source.")
      .def(nb::init<>())
      .def("add", &Batch::add, "tensor"_a, "row"_a, "col"_a, "rows"_a, "cols"_a, "address"_a, "row_stride_bytes"_a = 0,
           "device"_a = -1, "stream"_a = 0,
           "A rectangle of the tensor (layout index) and where its bytes begin; device: a CUDA ordinal, or -1.")
      .def("add_whole", &Batch::add_whole, "layout"_a, "tensors"_a, "addresses"_a,
           "Whole tensors by their layout index, whose rows lie one behind the other in host memory.")
      .def("clear", &Batch::clear)
      .def("__len__", &Batch::size);
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
      .def("__repr__", [](const OffloadReport& report) {
        return "<deltasync.OffloadReport " + to_string(report.version) + ", " + std::to_string(report.bytes) +
               " bytes in " + std::to_string(report.total_s) + " s>";
      });
}

/// A writer takes one call at a time, and a handler of a signal runs in the middle of one.
class CallOf {
 public:
  explicit CallOf(const Writer& writer) : writer_(&writer), alone_(under_way().insert(writer_).second) {}
  ~CallOf() {
    if (alone_) under_way().erase(writer_);
  }
  CallOf(const CallOf&) = delete;
  CallOf& operator=(const CallOf&) = delete;
  bool alone() const { return alone_; }
  void check() const {
    if (!alone_) throw Failure{Error(Errc::invalid_argument, "another call of this writer is under way")};
  }

 private:
  static std::set<const Writer*>& under_way() {  // protected by the GIL
    static std::set<const Writer*> writers;
    return writers;
  }

  const Writer* writer_;
  const bool alone_;
};

/// A call of the writer that signals end.
template <class F>
auto stoppable_by(Writer& writer, F&& call) {
  const CallOf one(writer);
  one.check();
  return stoppable([&](std::stop_token stop) {
    writer.stop_on(std::move(stop));
    return call();
  });
}

VersionId newest(const Writer& writer) {
  const CallOf one(writer);
  one.check();
  return writer.newest();
}

void write_batch(Writer& writer, const Batch& batch, bool wait, double timeout) {
  const CallOf one(writer);
  one.check();
  if (wait || !batch.on_device()) return unwrap(released([&] { return writer.write(batch.slices()); }));
  const Deadline deadline = deadline_after(timeout);
  unwrap(released([&]() -> Status {
    std::vector<SliceSource> host;
    std::vector<SliceSource> device;
    for (const SliceSource& item : batch.slices()) {
      (item.source.memory == Source::Memory::host ? host : device).push_back(item);
    }
    DS_TRY(writer.write(host));
    auto queued = writer.write_device(device, deadline);
    return queued ? Status() : Status(std::move(queued).error());
  }));
}

}  // namespace

void bind_writer(nb::module_& module) {
  bind_batch(module);
  bind_report(module);
  nb::class_<Writer>(module, "Writer", "One writer process's session with the agent. One thread calls it at a time.")
      .def_static("attach", &attach, "layout"_a, "sidecar"_a, "socket"_a, "index"_a = 0, "writers"_a = 1,
                  "threads"_a = 0, "name"_a = "trainer", "timeout"_a = 60.0)
      .def(
          "register_plan",
          [](Writer& writer, const Batch& batch, double timeout) {
            const auto plan = batch.plan();
            const Deadline deadline = deadline_after(timeout);
            unwrap(stoppable_by(writer, [&] { return writer.register_plan(plan, deadline); }));
          },
          "batch"_a, "timeout"_a = 60.0)
      .def(
          "begin",
          [](Writer& writer, const Version& version, double timeout) {
            const Deadline deadline = deadline_after(timeout);
            unwrap(stoppable_by(writer, [&] { return writer.begin(version, deadline); }));
          },
          "version"_a, "timeout"_a = 60.0)
      .def("write_batch", &write_batch, "batch"_a, "wait"_a = true, "timeout"_a = 60.0,
           "Sources on a device may be reused after it, too; without `wait` only after commit().")
      .def(
          "commit",
          [](Writer& writer, double timeout) {
            const Deadline deadline = deadline_after(timeout);
            return unwrap(stoppable_by(writer, [&] { return writer.commit(deadline); }));
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
            const Deadline deadline = deadline_after(timeout);
            unwrap(stoppable_by(writer, [&] { return writer.wait_ready(version.id, deadline); }));
          },
          "version"_a, "timeout"_a = 60.0)
      .def_prop_ro("newest_number", [](const Writer& writer) { return newest(writer).number; })
      .def_prop_ro("newest_epoch", [](const Writer& writer) { return newest(writer).epoch; })
      .def_prop_ro("layout", [](const Writer& writer) { return std::const_pointer_cast<Layout>(writer.layout()); });
}

}  // namespace deltasync::python
