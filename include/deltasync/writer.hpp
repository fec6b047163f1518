// The trainer side: fill the inactive half of the agent's segment with one model version, then seal it.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <string_view>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

/// Where the bytes of a slice come from. Not owned: the memory stays valid and unchanged until the call returns, with
/// write_device() until its copies have arrived.
///
/// ```cpp
/// const std::vector<float> down(64 * 1000);  // the trainer has it transposed
/// const Source source = {.data = down.data(), .row_stride_bytes = 4, .col_stride_bytes = 64 * 4};
/// ```
struct Source {
  const void* data = nullptr;  ///< first element of the slice
  /// Bytes from one row of the slice to the next; 0: rows are contiguous (slice columns × element bytes).
  std::size_t row_stride_bytes = 0;
  /// Bytes from one element of a row to the next; 0: they are contiguous. Of a device, elements are aligned to
  /// themselves.
  std::size_t col_stride_bytes = 0;
  Device device = {};  ///< whose memory it is; Errc::unsupported for a CUDA device in a build without CUDA
  /// Of a CUDA device: the cudaStream_t on which the values become ready. The copy comes after what it has at the call.
  /// Null is CUDA's default stream.
  void* stream = nullptr;
};

/// One rectangle of one tensor.
struct TensorSlice {
  std::uint32_t tensor = 0;  ///< layout index
  Rect rect;
};

/// A slice and where its bytes come from.
struct SliceSource {
  TensorSlice slice;
  Source source;
};

/// What one version cost the trainer. Times in seconds.
struct OffloadReport {
  Version version;
  double guard_s = 0;         ///< waiting until the inactive half was free (diff and leases of the version before)
  double copy_s = 0;          ///< inside write()
  double seal_s = 0;          ///< coverage check, waiting for the other writers, publishing
  double total_s = 0;         ///< begin() called → commit() returned
  std::uint64_t bytes = 0;    ///< written by this writer
  std::uint64_t tensors = 0;  ///< that this writer touched
  /// How long runs of host memory are copied, once that was chosen by the speed of several forms: in the third version
  /// or later, as copies show it (the first two write to pages that are new to the process).
  std::string_view copy_form = {};
};

struct WriterOptions {
  std::string agent_socket = {};   ///< path of the agent's Unix socket
  std::uint32_t writer_index = 0;  ///< which of the job's writers on this node this is; 0 leads
  std::uint32_t writers = 1;       ///< how many fill each version together
  /// Copy threads, the caller included; 0: 4, or as many as there are cores. They run where attach()'s caller may: a
  /// trainer that its launcher keeps near its GPU copies there too.
  unsigned threads = 0;
  std::string name = "trainer";  ///< for the agent's log
  /// How long write() waits for the copies of a device. The first of a process registers the halves with it before,
  /// which takes about 0.1 s for each GB and has no deadline.
  std::chrono::milliseconds device_timeout = std::chrono::minutes(1);
};

/// One writer process's session with its agent.
///
/// Threads: one thread calls it at a time; copies run on threads of its own. A forked child may only destroy its copy,
/// which disturbs nobody: its calls fail with Errc::invalid_argument. Destruction during a fill aborts it.
///
/// Deadlines and stops (CallOptions) end what waits for the agent or for other writers. A stop closes the connection to
/// the agent, and the next call makes it again. Copies of a device are waited for until the deadline, and a stop does
/// not end that.
///
/// ```cpp
/// const CallOptions minute = CallOptions::within(std::chrono::minutes(1));
/// DS_ASSIGN(const auto writer, Writer::attach(layout, {}, {.agent_socket = "/run/deltasync/agent.sock"}, minute));
/// const Version version{{writer->fresh_epoch(), 1}, "global_step_1"};
/// const std::vector<float> embed(1000 * 64);
/// const std::vector<std::pair<std::string, Source>> tensors = {{"embed.weight", {.data = embed.data()}}};
/// DS_ASSIGN(const OffloadReport report, writer->offload(version, tensors, minute));
/// std::printf("the trainer waited %.1f ms\n", report.total_s * 1e3);
/// ```
class Writer {
 public:
  /// Connects to the agent, which makes the segment for `layout` or hands out the one that is there, and maps it. While
  /// no agent listens (it may be starting) it is waited for. An empty sidecar leaves the one that the agent has.
  ///   - Errc::connection: no agent until the deadline; the message names the socket.
  ///   - Errc::timed_out, Errc::cancelled: an agent that does not answer.
  ///   - Errc::invalid_argument: no such writer of so many, or the path is another kind of file.
  ///   - Errc::permission: of the socket, or an agent of another user.
  ///   - Errc::io: the path cannot be a socket's.
  ///   - Errc::layout_mismatch: another live writer uses another layout.
  ///   - Errc::no_space: /dev/shm is too small (the message says how much is needed and there), or no thread is to be
  ///     had.
  ///   - Errc::already_exists: a live process has this index, or a session of this one; the message names the pid.
  ///   - Errc::protocol, Errc::corrupt, Errc::unsupported: what answers is no agent of this version.
  static Result<std::unique_ptr<Writer>> attach(LayoutPtr layout, const Sidecar& sidecar, WriterOptions options,
                                                const CallOptions& call = {});
  virtual ~Writer() = default;

  /// With several writers: the rectangles that this one will write in every fill. The agent checks once that those of
  /// all writers are disjoint and cover the layout, and waits for the plans of the others. With one writer this is
  /// optional. After an error no plan is registered.
  ///   - Errc::coverage: a tensor, which is named, that is covered twice or not at all.
  ///   - Errc::invalid_argument: a fill is open.
  ///   - Errc::timed_out, Errc::cancelled, Errc::connection.
  virtual Status register_plan(std::span<const TensorSlice> plan, const CallOptions& call = {}) = 0;

  /// Claims (writer 0) or joins (others) the inactive half. Waits while it is still being diffed or read.
  ///   - Errc::version_conflict: not after the last version of its epoch, or another epoch is being filled.
  ///   - Errc::timed_out, Errc::cancelled: the message names what holds the half.
  ///   - Errc::quarantined: a stopped writer (the message has its pid) or a device may still write there.
  ///   - Errc::invalid_argument: a fill is open already, epoch 0, a label that is too long or another version's number.
  virtual Status begin(const Version& version, const CallOptions& call = {}) = 0;

  /// Copies one slice. Returns when the source may be reused. Slices in device memory are waited for, at most as
  /// WriterOptions::device_timeout says. After an error, abort().
  ///   - Errc::coverage: written before, or not in the plan.
  ///   - Errc::out_of_range, Errc::invalid_argument: no such slice, or a source that cannot be one.
  ///   - Errc::aborted: by another writer, or after a death.
  ///   - Errc::unsupported: CUDA memory in a build without CUDA.
  virtual Status write(std::uint32_t tensor, const Rect& rect, const Source& source) = 0;
  /// The whole tensor.
  Status write(std::uint32_t tensor, const Source& source);
  Status write(std::string_view tensor, const Source& source);
  /// Many slices, in this order. Small ones cost a fraction of a call each.
  virtual Status write(std::span<const SliceSource> batch) = 0;

  /// Queues copies of slices in device memory and returns the number of a ticket for them and all before. The next ones
  /// may be queued while these are under way, and slices in host memory be written in between. The sources stay valid
  /// and unchanged until wait() or commit() says that they have arrived. Waits only if too much is under way already.
  /// The first call for a device page-locks both halves, which takes a while for a large model, and by which the
  /// deadline is later; where that is refused, copies go through a small buffer, and one line of the log says why.
  /// After an error, abort(). Errors are those of write(), and:
  ///   - Errc::io: what the driver said.
  ///   - Errc::timed_out, Errc::no_space.
  virtual Result<std::uint64_t> write_device(std::span<const SliceSource> batch, const CallOptions& call = {}) = 0;
  /// Waits until a ticket's copies and all before them have arrived, so that their sources may be reused.
  ///   - Errc::timed_out: wait again, or abort().
  ///   - Errc::io: abort().
  virtual Status wait(std::uint64_t ticket, const CallOptions& call = {}) = 0;

  /// Checks that everything was written once, waits for copies under way, publishes, and waits until all writers have.
  /// On any error the version is dropped, the active version stays, and a new begin() may follow. If copies of a device
  /// are still under way then, that begin() waits for them first.
  ///   - Errc::coverage: a tensor, which is named, that was not written whole.
  ///   - Errc::aborted: a write failed before, another writer died, or the agent has another segment by now.
  ///   - Errc::timed_out, Errc::cancelled: the message names the writers that are late.
  virtual Result<OffloadReport> commit(const CallOptions& call = {}) = 0;
  /// Drops the open fill, if any. Never fails and never waits for others; for copies of a device that are under way it
  /// waits a second at most. They may read their sources until wait() or begin() succeeds.
  virtual void abort() noexcept = 0;

  /// Waits until the agent serves this version (its delta is encoded).
  ///   - Errc::timed_out, Errc::cancelled, Errc::connection.
  virtual Status wait_ready(const VersionId& version, const CallOptions& call = {}) = 0;

  /// The version that was committed last to the segment, by any process; invalid if none was.
  virtual VersionId newest() const = 0;
  /// An epoch for a trainer that begins now: after those of all versions that the agent had heard of when this writer
  /// connected, in the segment or from receivers. One writer of a job calls it, once, and hands it to all others.
  virtual std::uint64_t fresh_epoch() const = 0;
  /// The half of the open fill, to read again what was written; empty if none is open. Valid until commit() or abort().
  virtual std::span<const std::byte> filling() const = 0;
  virtual const LayoutPtr& layout() const = 0;

  /// A whole version: begin(), a write() of each (name, Source) of a range or generator, commit(). Aborts on the first
  /// error, and when the range throws. Errors are those of the three calls.
  template <std::ranges::input_range R>
  requires requires(std::ranges::range_reference_t<R> item) {
    { item.first } -> std::convertible_to<std::string_view>;
    { item.second } -> std::convertible_to<Source>;
  }
  Result<OffloadReport> offload(const Version& version, R&& tensors, const CallOptions& call = {}) {
    DS_TRY(begin(version, call));
    const struct AbortAtExit {
      Writer& writer;
      ~AbortAtExit() { writer.abort(); }  // nothing to do after a commit
    } guard{*this};
    for (auto&& item : tensors) DS_TRY(write(std::string_view(item.first), Source(item.second)));
    return commit(call);
  }
};

}  // namespace deltasync
