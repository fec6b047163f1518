#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bucket/sender.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;
using bucket::Sender;

/// Below, a copy takes less time than giving the GIL to another thread.
constexpr std::size_t kBucketReleaseBytesMin = 64u << 10;

std::unique_ptr<Sender> open(std::shared_ptr<const Layout> layout, const Sidecar& sidecar, std::string socket,
                             std::uint32_t rank, std::uint32_t ranks, const std::vector<std::uint32_t>& tensors,
                             std::uint64_t bucket_bytes, std::string name, double timeout) {
  bucket::SenderOptions options{std::move(socket), rank, ranks, {}, bucket_bytes, std::move(name)};
  for (const std::uint32_t tensor : tensors) {  // ascending
    if (!options.tensors.empty() && options.tensors.back().end == tensor) {
      ++options.tensors.back().end;
    } else {
      options.tensors.push_back({tensor, std::uint64_t{tensor} + 1});
    }
  }
  return unwrap(stoppable_until(
      timeout, [&](const CallOptions& call) { return Sender::open(layout, sidecar, std::move(options), call); }));
}

/// Signals end it where it may wait for the engine.
Sender::Room room(Sender& sender, std::uint32_t tensor, double timeout) {
  if (sender.fits(tensor)) return unwrap(sender.room(tensor, options_after(timeout)));
  return unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return sender.room(tensor, call); }));
}

void put(Sender& sender, std::uint32_t tensor, std::uintptr_t address, double timeout) {
  const auto* const from = reinterpret_cast<const std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  for (;;) {
    const Sender::Room to = room(sender, tensor, timeout);
    const auto copy = [&] {
      if (!to.to.empty()) std::memcpy(to.to.data(), from + to.from, to.to.size());
    };
    if (to.to.size() < kBucketReleaseBytesMin) {
      copy();
    } else {
      released(copy);
    }
    if (to.last) return;
  }
}

}  // namespace

void bind_bucket(nb::module_& module) {
  nb::class_<Sender>(module, "BucketSender", "Hands a trainer's tensors to an engine of this host, in shared buckets.")
      .def_static("open", &open, "layout"_a, "sidecar"_a, "socket"_a, "rank"_a = 0, "ranks"_a = 1,
                  "tensors"_a = std::vector<std::uint32_t>(), "bucket_bytes"_a = std::uint64_t{256} << 20,
                  "name"_a = "trainer", "timeout"_a = 60.0, "tensors: ascending layout indices; none: all.")
      .def(
          "epoch_held",
          [](Sender& sender, double timeout) {
            return unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return sender.epoch_held(call); }));
          },
          "timeout"_a = 60.0, "Of the version that the engine has, once it wants one; 0: it has none.")
      .def(
          "begin",
          [](Sender& sender, const Version& version, double timeout) {
            unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return sender.begin(version, call); }));
          },
          "version"_a, "timeout"_a = 60.0)
      .def(
          "room",
          [](Sender& sender, std::uint32_t tensor, double timeout) {
            const Sender::Room found = room(sender, tensor, timeout);
            return std::make_tuple(reinterpret_cast<std::uintptr_t>(found.to.data()), found.to.size(), found.from,
                                   found.last);
          },
          "tensor"_a, "timeout"_a = 60.0, "(address, nbytes, first byte in the tensor, whether it is whole then).")
      .def("put", &put, "tensor"_a, "address"_a, "timeout"_a = 60.0, "All of a tensor, whose bytes are there.")
      .def(
          "finish",
          [](Sender& sender, double timeout) {
            unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return sender.finish(call); }));
          },
          "timeout"_a = 60.0)
      .def(
          "abort", [](Sender& sender, const std::string& why) { sender.abort(Error(Errc::aborted, why)); }, "why"_a);
}

}  // namespace deltasync::python
