// The timeline of this process: which stage of which version each thread was in, and when. Off until start_trace();
// timeline.md has the file and what the spans mean. `deltasync trace` lays the files of several processes on one
// clock.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "deltasync/result.hpp"

namespace deltasync {

struct TraceOptions {
  std::string process = "deltasync";  ///< this process's name on the timeline ("trainer", "rollout 3")
  /// Newest spans that are kept of each thread, 112 bytes each; older ones are dropped and counted.
  std::uint32_t spans_per_thread = 8192;
};

/// Begins a record and forgets the one before. From here on every stage of a Writer or Receiver of this process is
/// recorded; it costs about 0.1 µs a span, of which there are one or two for each 4 MiB of tensors. Any thread. A child
/// of fork() records nothing until it starts a record of its own.
void start_trace(const TraceOptions& options = {});
/// Ends recording; what was recorded can still be written.
void stop_trace();
/// Between start_trace() and stop_trace().
bool tracing() noexcept;

/// Writes what has been recorded so far as Chrome trace events (JSON), which Perfetto opens too: beside `file`, then
/// renamed, so that nobody reads a part. Any thread, while others record. Errors: invalid_argument (nothing was
/// started, or `file` is something other than a regular file), not_found, permission, no_space, io; they name the file.
Status write_trace(const std::filesystem::path& file);

}  // namespace deltasync
