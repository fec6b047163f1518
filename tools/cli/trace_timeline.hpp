// Timelines of several processes laid on one clock (timeline.md): what `deltasync trace` and `bench --trace` do with
// what the processes recorded.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync::tools {

/// How a process's times came onto the timeline's clock.
enum class ClockFrom : std::uint8_t {
  same,      ///< it has that clock
  measured,  ///< by the smallest round trip of somebody with its clock to that clock
  wall,      ///< by the time of day of both machines, which may differ by anything
};
const char* to_string(ClockFrom from);

/// One look at another clock, in microseconds of the own one.
struct ClockSight {
  std::string clock;
  double sent_us = 0;
  double received_us = 0;
  double theirs_us = 0;
};

struct TraceProcess {
  std::string source;  ///< file or address, for messages
  std::string name;
  std::int64_t pid = 0;     ///< on the timeline, where each process has one of its own
  std::int64_t os_pid = 0;  ///< on its machine
  std::string host;
  std::string boot_id;
  std::string clock;
  double monotonic_us = 0;  ///< its anchor: its clock, and the time of day then
  double realtime_us = 0;
  std::uint64_t dropped = 0;
  std::vector<ClockSight> sights;
  std::map<std::int64_t, std::string> threads;
  ClockFrom from = ClockFrom::same;
  double uncertainty_us = 0;  ///< not of `wall`
  double offset_us = 0;       ///< on the timeline = on its clock + this
};

struct TraceSpan {
  std::size_t process = 0;  ///< index
  std::int64_t tid = 0;
  std::string name;
  double begin_us = 0;
  double dur_us = 0;
  std::optional<VersionId> version;
  nlohmann::ordered_json args;

  double end_us() const { return begin_us + dur_us; }
  bool is_part() const { return args.contains("part"); }
};

struct Timeline {
  std::vector<TraceProcess> processes;
  std::vector<TraceSpan> spans;  ///< by their begin
  std::map<VersionId, std::string> labels;
  std::string clock;  ///< on which all times are, from `processes[].offset_us` on

  /// "label (epoch:number)"
  std::string name_of(const VersionId& version) const;
};

/// One recorded file, or a timeline that was merged before; its times are each process's own again. `source` names it
/// in messages. Errors: corrupt (not JSON, or a field is missing or wrong), unsupported (another schema).
Result<Timeline> parse_trace(std::string_view text, const std::string& source);

/// All on one clock: the one that most processes have or have looked at, which is the agent's, whether its own file is
/// there or not; if none stands out, the first process's. The first span begins at 0.
Timeline merge_traces(std::vector<Timeline> traces);

/// Chrome trace events.
std::string to_trace_json(const Timeline& timeline);

// ---- one version ---------------------------------------------------------------------------------------------

/// What one process did in one stage of one version.
struct Stage {
  std::size_t process = 0;
  std::string name;
  double begin_us = 0;  ///< after offload was called; where that is not recorded, after the first span
  double end_us = 0;
  double busy_us = 0;  ///< sum over threads of the time that each was at it
  std::uint64_t bytes = 0;
  std::size_t spans = 0;
  /// When any thread was at it, disjoint and in order.
  std::vector<std::pair<double, double>> intervals;
};

/// By number, by "epoch:number" or by label, the newest of them; nullopt: the newest that a receiver committed, else
/// the newest. not_found.
Result<VersionId> find_version(const Timeline& timeline, const std::optional<std::string>& wanted);

/// In the order of their begin.
std::vector<Stage> stages_of(const Timeline& timeline, const VersionId& version);

/// A picture of the stages, readable on light and dark pages.
std::string to_svg(const Timeline& timeline, const VersionId& version);

}  // namespace deltasync::tools
