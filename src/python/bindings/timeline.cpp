#include "deltasync/timeline.hpp"

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>

#include "base/trace.hpp"
#include "deltasync/version.hpp"
#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

/// The line of this name. Called with the GIL held.
std::uint32_t track_of(const std::string& line) {
  static std::map<std::string, std::uint32_t> tracks;
  static std::uint32_t session = 0;
  const std::uint32_t now = trace::detail::session.load(std::memory_order_relaxed);
  if (session != now) tracks.clear();
  session = now;
  if (now == 0) return 0;
  const auto [found, is_new] = tracks.try_emplace(line, 0);
  if (is_new) found->second = trace::add_track(line);
  return found->second;
}

/// Names of spans are literals.
const char* stage_name(std::string_view name) {
  for (const char* known : {"pack", "gather", "convert"}) {
    if (name == known) return known;
  }
  throw nb::value_error("no such stage");
}

/// Work that Python does for a version, from here to end().
class Stage {
 public:
  Stage(const std::string& line, std::string_view name, const Version* version)
      : span_(std::in_place, track_of(line), stage_name(name), version == nullptr ? VersionId{} : version->id) {}
  void end(std::uint64_t bytes) {
    if (span_) span_->set({"bytes", bytes});
    span_.reset();
  }

 private:
  std::optional<trace::TrackSpan> span_;
};

}  // namespace

void bind_timeline(nb::module_& module) {
  module.def(
      "start_timeline", [](std::string process) { deltasync::start_timeline(std::move(process)); }, "process"_a,
      "Records what each stage of this process's writers and receivers takes, from now on.");
  module.def("stop_timeline", &deltasync::stop_timeline, "Ends recording; what was recorded can still be written.");
  module.def(
      "write_timeline", [](const std::filesystem::path& file) { unwrap(deltasync::write_timeline(file)); }, "file"_a,
      "What has been recorded so far, as Chrome trace events (docs/guides/timeline.md); `deltasync trace` lays files "
      "together.");
  nb::class_<Stage>(module, "Stage", "A stage of the timeline, on a line of its own, from now until end().")
      .def(nb::init<const std::string&, std::string_view, const Version*>(), "line"_a, "name"_a, "version"_a.none())
      .def("end", &Stage::end, "bytes"_a);
}

}  // namespace deltasync::python
