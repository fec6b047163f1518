// The trainer side: fill the inactive half with one model version, then seal it.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/deadline.hpp"
#include "deltasync/hf.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

/// Where the bytes of a slice come from. Not owned; must stay valid and unchanged until the call returns, with
/// write_device() until its copies have arrived. The elements of a row lie one behind the other: a transposed source
/// cannot be said, in either memory.
struct Source {
  enum class Memory : std::uint8_t { host, cuda };

  const void* data = nullptr;  ///< first element of the slice
  /// Bytes from one row of the slice to the next; 0 = rows lie one after the other (slice columns × element bytes).
  std::size_t row_stride_bytes = 0;
  Memory memory = Memory::host;  ///< cuda: memory of `device`; `unsupported` in a build without CUDA
  int device = 0;                ///< for cuda: its number there
  /// For cuda: the cudaStream_t on which the values become ready. The copy comes after what it has at the call. Null is
  /// CUDA's default stream.
  void* stream = nullptr;
};

/// What one version cost. Times in seconds.
struct OffloadReport {
  Version version;
  double guard_s = 0;         ///< waiting until the inactive half was free (diff and leases of the version before)
  double copy_s = 0;          ///< inside write()
  double seal_s = 0;          ///< coverage check, waiting for the other writers, publishing
  double total_s = 0;         ///< begin() called → commit() returned
  std::uint64_t bytes = 0;    ///< written by this writer
  std::uint64_t tensors = 0;  ///< tensors that this writer touched
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

/// Copies that write_device() queued, and all before them.
struct CopyTicket {
  std::uint64_t number = 0;
};

struct WriterOptions {
  std::string agent_socket;        ///< path of the agent's Unix socket
  std::uint32_t writer_index = 0;  ///< which of the job's writers on this node this is; 0 leads
  std::uint32_t writers = 1;       ///< how many fill each version together
  /// Copy threads, the caller included; 0 = min(4, cores). They run where attach()'s caller may: a trainer that its
  /// launcher keeps near its GPU copies there too.
  unsigned threads = 0;
  std::string name = "trainer";  ///< for the agent's log
  /// How long write() waits for the copies of a device. The first of a process registers the halves with it before,
  /// which takes about 0.1 s for each GB and has no deadline.
  std::chrono::milliseconds device_limit = std::chrono::minutes(1);
};

/// A whole version in a half of the segment; a tensor's bytes begin at its Tensor::offset.
struct HeldVersion {
  Version version;
  std::span<const std::byte> bytes;
};

/// One writer process's session. Not thread-safe: one thread calls it at a time (copies run on its own threads).
/// Destruction during a fill aborts it. A forked child may only destroy its copy, which disturbs nobody; its calls fail
/// with invalid_argument.
class Writer {
 public:
  /// Connects to the agent, which creates the segment for `layout` or hands out the existing one, and maps it. While no
  /// agent listens (it may be starting, or being restarted) it is waited for until the deadline. An empty sidecar
  /// leaves the one that is there; where there is none, receivers' directories get one file, model.safetensors. Errors:
  /// connection (no agent until the deadline; the message names the socket), invalid_argument (also: the path is
  /// another kind of file), permission (of the socket, or an agent of another user), io (the path cannot be a
  /// socket's), layout_mismatch (another live writer uses another layout), no_space (/dev/shm too small: the message
  /// says how much is needed and there; no thread to be had), already_exists (the index is taken by a live process, or
  /// by a session of this one; the message names the pid), timed_out; protocol, corrupt, unsupported (what answers is
  /// no agent of this version).
  static Result<std::unique_ptr<Writer>> attach(LayoutPtr layout, const Sidecar& sidecar, WriterOptions options,
                                                Deadline deadline);
  virtual ~Writer() = default;

  /// From now on this stop ends, with `cancelled`, whatever waits for the agent or for other writers: register_plan(),
  /// begin(), commit() and wait_ready(), as their deadlines would; these calls, too, if it is requested before them. It
  /// replaces the stop before; one that cannot be requested ends nothing. The connection to the agent is closed by it,
  /// and made anew by the next call. A device's copies are waited for until the deadline all the same.
  virtual void stop_on(std::stop_token stop) = 0;

  /// With several writers: the rectangles that this one will write in every fill. The agent checks once that all
  /// writers' rectangles are disjoint and cover the layout (coverage errors name the tensor). Waits for the other
  /// writers' plans until the deadline. With one writer this is optional. After an error no plan is registered.
  virtual Status register_plan(std::span<const TensorSlice> plan, Deadline deadline) = 0;

  /// Claims (writer 0) or joins (others) the inactive half. Waits while it is still being diffed or read.
  /// Errors: version_conflict (not after the last one of its epoch, or another epoch is being filled), timed_out (names
  /// what holds the half), quarantined (names the pid, or the device that may still write), invalid_argument (a fill is
  /// open already, epoch 0, label too long).
  virtual Status begin(const Version& version, Deadline deadline) = 0;

  /// Copies one slice. Returns when the source may be reused. Errors: coverage (written before, or not in the plan),
  /// out_of_range, aborted (by another writer or after a death), unsupported. After an error, abort(). A source in
  /// device memory is copied as by write_device() and waited for, at most as WriterOptions::device_limit says.
  virtual Status write(std::uint32_t tensor, const Rect& rect, const Source& source) = 0;
  /// The whole tensor.
  Status write(std::uint32_t tensor, const Source& source);
  Status write(std::string_view tensor, const Source& source);

  /// Copies many slices, in this order, as write() does each. Small ones cost a fraction of a call each.
  virtual Status write(std::span<const SliceSource> batch) = 0;

  /// Queues copies of slices in device memory and returns; the next ones may be queued while these are under way. The
  /// sources must stay valid and unchanged until wait() or commit() says that they have arrived. Slices in host memory
  /// may be written in between. Waits, until the deadline, only if too much is under way already. The first call for a
  /// device registers both halves with it (page-locks them), which takes a while for a large model, and by which the
  /// deadline is later; where that is refused, copies go through a small buffer, and one line of the log says why.
  /// Errors: as write(); io (what the driver said), timed_out, no_space. After an error, abort().
  virtual Result<CopyTicket> write_device(std::span<const SliceSource> batch, Deadline deadline) = 0;
  /// Until the ticket's copies and all before them have arrived, so that their sources may be reused. timed_out (wait
  /// again, or abort()), io (abort()).
  virtual Status wait(CopyTicket ticket, Deadline deadline) = 0;

  /// Checks that everything was written once, waits for copies under way, publishes, and waits until all writers have.
  /// On any error the version is dropped, the active version stays, and a new begin() may follow. If copies of a device
  /// are still under way then, that begin() waits for them first, and fails with `quarantined` if they do not end.
  virtual Result<OffloadReport> commit(Deadline deadline) = 0;
  /// Drops the open fill, if any. Never fails, never waits for others; for copies of a device that are under way it
  /// waits a second at most. They may read their sources until wait() or begin() succeeds.
  virtual void abort() noexcept = 0;

  /// Waits until the agent serves this version (its delta is encoded). timed_out, connection.
  virtual Status wait_ready(const VersionId& version, Deadline deadline) = 0;

  /// The version that was committed last to the segment as it is now, by whomever; invalid if none.
  virtual VersionId newest() const = 0;
  /// An epoch for a trainer that begins now: after those of all versions that the agent had heard of when this writer
  /// connected, in the segment or from receivers. One writer of a job calls it, once, and hands it to all others.
  virtual std::uint64_t fresh_epoch() const = 0;
  /// A random number of the agent process that this writer connected to last: it tells two agents apart.
  virtual std::uint64_t agent_instance() const = 0;
  /// The same and where it lies. The bytes stay as they are until a later version is committed. They are not to be read
  /// any more after the next begin(), register_plan() or wait_ready(), which may map another segment: ask again then.
  virtual std::optional<HeldVersion> held() const = 0;
  /// The half of the open fill, to read again what was written; empty if none is open. Until commit() or abort().
  virtual std::span<const std::byte> filling() const = 0;
  virtual const LayoutPtr& layout() const = 0;

  /// begin → write every (name, Source) of a range or generator → commit; aborts on the first error, and when the
  /// range throws.
  template <std::ranges::input_range R>
  requires requires(std::ranges::range_reference_t<R> item) {
    { item.first } -> std::convertible_to<std::string_view>;
    { item.second } -> std::convertible_to<Source>;
  }
  Result<OffloadReport> offload(const Version& version, R&& tensors, Deadline deadline) {
    DS_TRY(begin(version, deadline));
    const struct AbortAtExit {
      Writer& writer;
      ~AbortAtExit() { writer.abort(); }  // nothing to do after a commit
    } guard{*this};
    for (auto&& item : tensors) DS_TRY(write(std::string_view(item.first), Source(item.second)));
    return commit(deadline);
  }
};

}  // namespace deltasync
