// Sources in device memory: cut into pieces, queued flight by flight, and what becomes of them when a fill is aborted.
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "writer/session.hpp"

namespace deltasync {
namespace {

constexpr std::size_t kFlightJobsMax = 4096;

struct SlicePart {
  Rect rect;
  CopyJob job;
};

/// Calls `each(SlicePart)` with parts of a slice of at most `bytes_max`: blocks of its rows, or parts of them where
/// rows are long. So a large tensor is diffed while the rest of it is still being copied.
template <class F>
Status for_each_part(const Rect& rect, std::uint64_t element_bytes, const CopyJob& job, std::uint64_t bytes_max,
                     F each) {
  if (rect.elements() == 0) return {};
  const std::uint64_t elements_max = std::max<std::uint64_t>(1, bytes_max / element_bytes);
  const std::uint64_t cols = std::min(rect.cols, elements_max);
  const std::uint64_t rows = elements_max / cols;
  for (std::uint64_t row = 0; row < rect.rows; row += rows) {
    for (std::uint64_t col = 0; col < rect.cols; col += cols) {
      SlicePart part;
      part.rect = {rect.row + row, rect.col + col, std::min(rows, rect.rows - row), std::min(cols, rect.cols - col)};
      part.job = job;
      part.job.to += row * job.to_stride + col * element_bytes;
      part.job.from += row * job.from_stride + col * (job.from_col_stride != 0 ? job.from_col_stride : element_bytes);
      part.job.rows = part.rect.rows;
      part.job.row_bytes = static_cast<std::size_t>(part.rect.cols * element_bytes);
      DS_TRY(each(part));
    }
  }
  return {};
}

}  // namespace

Result<std::uint64_t> WriterSession::write_device(std::span<const SliceSource> batch, const CallOptions& call) {
  DS_TRY(check_open("write_device"));
  for (const SliceSource& item : batch) {
    if (!item.source.device.is_host()) continue;
    return Error(Errc::invalid_argument, "write_device: tensor " + std::to_string(item.slice.tensor) +
                                             " is in host memory, which write() copies");
  }
  const auto start = Clock::now();
  const trace::Span span("queue copies", report_.version.id);
  failed_ = true;  // until everything below went well
  DS_TRY(open_copy_streams(batch));
  const Deadline deadline(Deadline::of(call).at() + (Clock::now() - start));  // for the copies, as write() has it
  DS_TRY(queue_runs(batch, deadline));
  failed_ = false;
  report_.copy_s += std::chrono::duration<double>(Clock::now() - start).count();
  return tickets_;
}

Status WriterSession::open_copy_streams(std::span<const SliceSource> batch) {
  std::optional<std::int32_t> opened;
  for (const SliceSource& item : batch) {
    if (opened == item.source.device.ordinal) continue;
    opened = item.source.device.ordinal;
    if (auto copies = copy_streams_->stream_for(*opened, segment_, *role_, copier_); !copies) {
      return std::move(copies).error().with_context("write to " + to_string(report_.version));
    }
  }
  return {};
}

/// Neighbours on the same device and stream at a time.
Status WriterSession::queue_runs(std::span<const SliceSource> batch, Deadline deadline) {
  ++tickets_;
  while (!batch.empty()) {
    const Source& first = batch.front().source;
    const auto end = std::find_if(batch.begin(), batch.end(), [&](const SliceSource& item) {
      return item.source.device != first.device || item.source.stream != first.stream;
    });
    const auto run = batch.first(static_cast<std::size_t>(end - batch.begin()));
    if (auto queued = queue_run(run, deadline); !queued) {
      return std::move(queued).with_context("write to " + to_string(report_.version));
    }
    batch = batch.subspan(run.size());
  }
  return {};
}

Status WriterSession::queue_run(std::span<const SliceSource> run, Deadline deadline) {
  const Source& first = run.front().source;
  DS_ASSIGN(CopyStream* const copies, copy_streams_->stream_for(first.device.ordinal, segment_, *role_, copier_));
  DS_TRY(copies->follow({first.stream}));
  std::uint64_t bytes = 0;
  jobs_.clear();
  progress_.clear();
  const auto fly = [&]() -> Status {
    DS_TRY(copies->queue(*fill_, jobs_, progress_.parts(), tickets_, deadline));
    jobs_.clear();
    progress_.clear();
    bytes = 0;
    return {};
  };
  for (const SliceSource& item : run) {
    DS_ASSIGN(const CopyJob job, accept(item));
    const std::uint32_t tensor = item.slice.tensor;
    const auto add = [&](const SlicePart& part) -> Status {
      const std::uint64_t more = part.job.rows * part.job.row_bytes;
      const bool full = bytes + more > copies->flight_bytes_max() || jobs_.size() == kFlightJobsMax;
      if (full && !jobs_.empty()) DS_TRY(fly());
      jobs_.push_back(part.job);
      progress_.add(tensor, part.rect);
      bytes += more;
      return {};
    };
    Status added =
        for_each_part(item.slice.rect, layout_->tensors()[tensor].element_bytes, job, copies->flight_bytes_max(), add);
    if (!added) return added;
  }
  return jobs_.empty() ? Status{} : fly();
}

Status WriterSession::wait(std::uint64_t ticket, const CallOptions& call) {
  DS_TRY(check_process());
  if (ticket > tickets_) {
    return Error(Errc::invalid_argument,
                 "wait: copy ticket " + std::to_string(ticket) + " of " + std::to_string(tickets_));
  }
  const Deadline deadline = Deadline::of(call);
  if (!fill_) return copy_streams_->settle(deadline);  // of a fill that was aborted
  const auto start = Clock::now();
  Status arrived = copy_streams_->wait(ticket, deadline);
  report_.copy_s += std::chrono::duration<double>(Clock::now() - start).count();
  if (!arrived && arrived.error().code() != Errc::timed_out) failed_ = true;
  return arrived;
}

/// A phase word can announce the copies of one fill only, so those of the fill before end first.
Status WriterSession::settle_before(const Version& version, Deadline deadline) {
  if (!copy_streams_->busy()) return {};
  auto settled = copy_streams_->settle(deadline);
  if (settled) return {};
  return Error(Errc::quarantined, "begin " + to_string(version) +
                                      ": a device may still write what was aborted, for pid " +
                                      std::to_string(::getpid()) + ": " + settled.error().message());
}

void WriterSession::abort_fill(Deadline settle) noexcept {
  if (!fill_) return;
  if (fork_guard_.same_process()) {
    // First, so that the fill is over before its brackets close.
    role_->abort(*fill_);
    if (const auto settled = copy_streams_->settle(settle); !settled) {
      log::warn("writer half_stays_quarantined half={} why=\"{}\"", fill_->half, settled.error().to_string());
    }
  }
  fill_.reset();
  failed_ = false;
}

}  // namespace deltasync
