#include "deltasync/receiver.hpp"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "deltasync/target.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

FullUpdatePolicy policy_named(const std::string& name) {
  if (name == "stage") return FullUpdatePolicy::stage;
  if (name == "in_place") return FullUpdatePolicy::in_place;
  if (name == "refuse") return FullUpdatePolicy::refuse;
  throw Failure{Error(Errc::invalid_argument, "full_update_policy is stage, in_place or refuse, not '" + name + "'")};
}

/// What bind() takes: made in Python, consumed there.
struct NewTarget {
  std::unique_ptr<Target> target;
  std::vector<Slice> slices;
};

NewTarget host_target(std::shared_ptr<const Layout> layout, std::uintptr_t address, std::uint64_t bytes,
                      const std::shared_ptr<Placement>& part) {
  auto* memory = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  if (memory != nullptr && bytes < layout->half_bytes()) {
    throw Failure{Error(Errc::invalid_argument, "host target: " + std::to_string(bytes) + " bytes of memory for " +
                                                    std::to_string(layout->half_bytes()))};
  }
  return {make_host_target(std::move(layout), {memory, static_cast<std::size_t>(memory != nullptr ? bytes : 0)}),
          part ? part->slices() : std::vector<Slice>()};
}

NewTarget placed_target(const std::shared_ptr<Placement>& placement, bool live, const nb::dict& streams, bool shadow) {
  PlacedTargetOptions options;
  options.live = live;
  if (shadow) options.shadow = ShadowOptions();
  for (const auto& [device, of_device] : streams) {
    for (const std::uintptr_t address : nb::cast<std::vector<std::uintptr_t>>(of_device)) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      options.engine_streams.emplace(nb::cast<std::int32_t>(device), reinterpret_cast<void*>(address));
    }
  }
  return {unwrap(released([&] { return make_placed_target(placement, options); })), placement->slices()};
}

NewTarget hf_target(std::shared_ptr<const Layout> layout, const Sidecar& sidecar, const std::filesystem::path& out,
                    bool flush, std::optional<std::uint64_t> disk_reserve_bytes, unsigned keep_before) {
  return {unwrap(released([&] {
            HfTargetOptions options;
            options.flush = flush;
            options.disk_reserve_bytes = disk_reserve_bytes;
            options.keep_before = keep_before;
            return make_hf_target(std::move(layout), sidecar, out, options);
          })),
          {}};
}

Want want_of(const std::optional<std::uint64_t>& number, const std::optional<std::string>& label, std::uint64_t epoch,
             bool newer) {
  if (number && label) throw Failure{Error(Errc::invalid_argument, "pull: a number or a label, not both")};
  Want want;
  if (label && label->empty()) throw Failure{Error(Errc::invalid_argument, "pull: an empty label names no version")};
  want.number = number;
  if (number) want.epoch = epoch;
  want.label = label.value_or("");
  want.newer = newer;
  return want;
}

nb::dict report_of(const PullReport& report) {
  nb::dict fields;
  fields["mode"] = std::string(to_string(report.mode));
  fields["version"] = report.version;
  fields["root"] = to_string(report.root);
  fields["wire_bytes"] = report.wire_bytes;
  fields["local_bytes"] = report.local_bytes;
  fields["full_bytes"] = report.full_bytes;
  fields["metadata_bytes"] = report.metadata_bytes;
  fields["tiles"] = report.tiles;
  fields["changed"] = report.changed;
  fields["delta_steps"] = report.delta_steps;
  fields["replans"] = report.replans;
  fields["stream_restarts"] = report.stream_restarts;
  fields["repaired_tiles"] = report.repaired_tiles;
  fields["packed"] = report.packed;
  fields["transports"] = report.transports;
  fields["wait_s"] = report.wait_s;
  fields["transfer_s"] = report.transfer_s;
  fields["verify_s"] = report.verify_s;
  fields["commit_s"] = report.commit_s;
  fields["attest_s"] = report.attest_s;
  return fields;
}

OlderEpoch older_epoch_named(const std::string& name) {
  if (name == "follow") return OlderEpoch::follow;
  if (name == "wait") return OlderEpoch::wait;
  if (name == "fail") return OlderEpoch::fail;
  throw Failure{Error(Errc::invalid_argument, "on_older_epoch is follow, wait or fail, not '" + name + "'")};
}

std::optional<bool> local_named(const std::string& name) {
  if (name == "auto") return std::nullopt;
  if (name == "never") return false;
  if (name == "always") return true;
  throw Failure{Error(Errc::invalid_argument, "local is auto, never or always, not '" + name + "'")};
}

std::unique_ptr<Receiver> connect(std::string endpoint, std::string token, unsigned streams, unsigned threads,
                                  std::string cores, const std::string& full_update_policy, bool attest_commits,
                                  double link_gbps, const std::string& local, const std::string& on_older_epoch,
                                  std::string name, const TlsOptions& tls, double timeout) {
  ReceiverOptions options;
  options.tls = tls;
  options.endpoint = std::move(endpoint);
  options.token = std::move(token);
  options.streams = streams;
  options.threads = threads;
  options.cores = std::move(cores);
  options.full_update_policy = policy_named(full_update_policy);
  options.attest_commits = attest_commits;
  options.link_gbps = link_gbps;
  options.local = local_named(local);
  options.on_older_epoch = older_epoch_named(on_older_epoch);
  options.name = std::move(name);
  return unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return Receiver::connect(options, call); }));
}

void bind_target(Receiver& receiver, NewTarget& target, double timeout) {
  if (!target.target) throw Failure{Error(Errc::invalid_argument, "bind: this target was bound before")};
  unwrap(stoppable_until(
      timeout, [&](const CallOptions& call) { return receiver.bind(std::move(target.target), target.slices, call); }));
}

/// Ends a wait in another thread: a std::stop_source.
class StopSource {
 public:
  void request_stop() { source_.request_stop(); }
  bool stop_requested() const { return source_.stop_requested(); }
  std::stop_token token() const { return source_.get_token(); }

 private:
  std::stop_source source_;
};

/// stoppable_until() a deadline, a signal or `source`, which may be null.
template <class F>
auto stoppable_by(const StopSource* source, double timeout, F&& body) {
  return stoppable_until(timeout, [&](const CallOptions& call) {
    if (source == nullptr) return body(call);
    std::stop_source either;
    const auto end = [&either] { either.request_stop(); };
    const std::stop_callback by_signal(call.stop, end);
    const std::stop_callback by_source(source->token(), end);
    return body({.deadline = call.deadline, .stop = either.get_token()});
  });
}

std::unique_ptr<StagedUpdate> pull(Receiver& receiver, const std::optional<std::uint64_t>& number,
                                   const std::optional<std::string>& label, std::uint64_t epoch, bool newer,
                                   double timeout, const StopSource* source, const std::filesystem::path& directory) {
  Want want = want_of(number, label, epoch, newer);
  want.directory = directory;
  return unwrap(stoppable_by(source, timeout, [&](const CallOptions& call) { return receiver.pull(want, call); }));
}

bool is_current(Receiver& receiver, const StagedUpdate& staged, const std::optional<std::uint64_t>& number,
                const std::optional<std::string>& label, std::uint64_t epoch, double timeout) {
  const Want want = want_of(number, label, epoch, false);
  return unwrap(
      stoppable_until(timeout, [&](const CallOptions& call) { return receiver.is_current(staged, want, call); }));
}

nb::list attest(Receiver& receiver, double timeout) {
  const auto wrong = unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return receiver.attest(call); }));
  nb::list tiles;
  for (const TileMismatch& tile : wrong) tiles.append(nb::make_tuple(tile.tile, tile.tensor, tile.copy_in));
  return tiles;
}

nb::dict fields_of(const RepairReport& report) {
  nb::dict fields;
  fields["version"] = report.version;
  fields["tiles"] = report.tiles;
  fields["nbytes"] = report.bytes;
  fields["fetched"] = report.fetched;
  fields["wire_bytes"] = report.wire_bytes;
  fields["metadata_bytes"] = report.metadata_bytes;
  fields["total_s"] = report.total_s;
  fields["attest_s"] = report.attest_s;
  return fields;
}

nb::dict repair(Receiver& receiver, const std::vector<std::uint64_t>& tiles, double timeout) {
  return fields_of(
      unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return receiver.repair(tiles, call); })));
}

void release(Receiver& receiver, double timeout) {
  unwrap(stoppable_until(timeout, [&](const CallOptions& call) { return receiver.release(call); }));
}

nb::dict restore(Receiver& receiver, double timeout, const StopSource* source) {
  return fields_of(
      unwrap(stoppable_by(source, timeout, [&](const CallOptions& call) { return receiver.restore(call); })));
}

nb::dict lag_of(const Receiver& receiver, double timeout) {
  const Lag lag = stoppable_until(timeout, [&](const CallOptions& call) { return receiver.lag(call); });
  nb::dict fields;
  fields["versions"] = lag.versions;
  fields["seconds"] = lag.seconds;
  fields["held"] = lag.held;
  fields["newest"] = lag.newest;
  fields["newest_age_s"] = lag.newest_age_s;
  fields["heard_newest"] = lag.heard_newest;
  fields["heard_s"] = lag.heard_s;
  fields["last_error"] = lag.last_error;
  return fields;
}

void bind_staged(nb::module_& module) {
  nb::class_<StagedUpdate>(module, "StagedUpdate", "A verified update that is not yet visible.")
      .def_prop_ro("report", [](const StagedUpdate& staged) { return report_of(staged.report()); })
      .def_prop_ro("is_staged", &StagedUpdate::is_staged)
      .def(
          "commit",
          [](StagedUpdate& staged, double timeout) {
            const CallOptions call = options_after(timeout);
            unwrap(released([&] { return staged.commit(call); }));
          },
          "timeout"_a = 600.0)
      .def("rollback", [](StagedUpdate& staged) { unwrap(released([&] { return staged.rollback(); })); });
}

}  // namespace

void bind_receiver(nb::module_& module) {
  nb::class_<NewTarget>(module, "Target", "Keeps the versions. Bound once, by Receiver.bind.")
      .def_prop_ro(
          "spent", [](const NewTarget& target) { return target.target == nullptr; }, "Whether bind() has taken it.");
  module.def("host_target", &host_target, "layout"_a, "address"_a = 0, "nbytes"_a = 0, "part"_a = nb::none(),
             "In host memory of at least layout.half_bytes, which the caller keeps; 0: memory of its own. part: a "
             "Placement; then only the tiles that it places are kept.");
  module.def("placed_target", &placed_target, "placement"_a, "live"_a = false, "streams"_a = nb::dict(),
             "shadow"_a = false,
             "Where an engine keeps its weights, on the host or on devices. streams: {device: cudaStream_t}.");
  module.def(
      "hf_target", &hf_target, "layout"_a, "sidecar"_a, "out"_a, "flush"_a = true, "disk_reserve_bytes"_a = nb::none(),
      "keep_before"_a = 1,
      "Immutable HF directories, and the symlink out/current. disk_reserve_bytes: of the disk stay free; None: 5 "
      "% of it, 1 GiB at most. keep_before: versions before the committed one that stay in any case.");
  nb::class_<StopSource>(module, "StopSource", "Ends a pull that waits in another thread.")
      .def(nb::init<>())
      .def("request_stop", &StopSource::request_stop)
      .def_prop_ro("stop_requested", &StopSource::stop_requested);
  bind_staged(module);
  nb::class_<TlsOptions>(module, "TlsOptions", "Files of one side's TLS; none: no TLS. See deltasync.Tls.")
      .def(
          "__init__",
          [](TlsOptions* made, const std::string& cert, const std::string& key, const std::string& ca,
             const std::string& name, std::vector<std::string> allow) {
            new (made) TlsOptions;
            made->cert = cert;
            made->key = key;
            made->ca = ca;
            made->name = name;
            made->allow = std::move(allow);
          },
          "cert"_a = "", "key"_a = "", "ca"_a = "", "name"_a = "", "allow"_a = std::vector<std::string>());
  nb::class_<Receiver>(module, "Receiver", "One receiver of one agent. One thread calls it at a time.")
      .def_static("connect", &connect, "endpoint"_a, "token"_a = "", "streams"_a = 4, "threads"_a = 0, "cores"_a = "",
                  "full_update_policy"_a = "stage", "attest_commits"_a = false, "link_gbps"_a = 0.0, "local"_a = "auto",
                  "on_older_epoch"_a = "follow", "name"_a = "receiver", "tls"_a = TlsOptions(), "timeout"_a = 60.0)
      .def("bind", &bind_target, "target"_a, "timeout"_a = 60.0)
      .def("pull", &pull, "number"_a = nb::none(), "label"_a = nb::none(), "epoch"_a = 0, "newer"_a = false,
           "timeout"_a = 60.0, "stop"_a = nb::none(), "directory"_a = "")
      .def("is_current", &is_current, "staged"_a, "number"_a = nb::none(), "label"_a = nb::none(), "epoch"_a = 0,
           "timeout"_a = 60.0)
      .def("attest", &attest, "timeout"_a = 60.0, "Tiles that are not the version's: [(tile, tensor, copy_in)].")
      .def("repair", &repair, "tiles"_a, "timeout"_a = 60.0, "Brings these tiles of the version again.")
      .def("release", &release, "timeout"_a = 60.0, "Gives live memory up; a shadow keeps the version.")
      .def("restore", &restore, "timeout"_a = 60.0, "stop"_a = nb::none(),
           "Writes live memory from the shadow, or pulls.")
      .def("lag", &lag_of, "timeout"_a = 5.0, "Any thread, during any other call.")
      .def_prop_ro("progress", &Receiver::progress, "(done, total) bytes of a full update under way. Any thread.")
      .def_prop_ro("current", [](const Receiver& receiver) { return receiver.current(); })
      .def_prop_ro("layout",
                   [](const Receiver& receiver) { return std::const_pointer_cast<Layout>(receiver.layout()); })
      .def_prop_ro("sidecar", [](const Receiver& receiver) { return receiver.sidecar(); });
}

}  // namespace deltasync::python
