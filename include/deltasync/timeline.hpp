// The timeline of this process: which stage of which version each thread was in, and when. Off until start_timeline().
// timeline.md has the file and what the spans mean; `deltasync trace` lays the files of several processes on one
// clock.
//
// ```cpp
// start_timeline("rollout 3");
// DS_TRY(receiver.pull());
// DS_TRY(write_timeline("rollout-3.json"));
// ```
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "deltasync/result.hpp"

namespace deltasync {

/// Begins a record of every stage of this process's writers and receivers, and forgets the record before. Any thread.
/// A span costs about 0.1 µs, and there are one or two for each 4 MiB of tensors. A child of fork() records nothing
/// until it starts a record of its own.
///   - `process` is its name on the timeline ("trainer", "rollout 3").
///   - `spans_per_thread`: as many of the newest spans are kept, 112 bytes each; older ones are dropped and counted.
void start_timeline(std::string process = "deltasync", std::uint32_t spans_per_thread = 8192);
/// Ends recording; what was recorded can still be written. Any thread.
void stop_timeline();
/// Between start_timeline() and stop_timeline(). Any thread.
bool timeline_is_on() noexcept;

/// Writes what has been recorded so far as Chrome trace events (JSON), which Perfetto opens too. It is written beside
/// `file` and renamed, so that nobody reads a part. Any thread, while others record. Errors name the file:
///   - Errc::invalid_argument: nothing was started, or `file` is something other than a regular file.
///   - Errc::not_found, Errc::permission, Errc::no_space, Errc::io: the file cannot be written.
Status write_timeline(const std::filesystem::path& file);

}  // namespace deltasync
