#include "writer/copy_stream.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace deltasync {

Result<std::unique_ptr<CopyStream>> CopyStream::open(const Surroundings& around, const DeviceLimits& limits) {
  auto copies = std::make_unique<CopyStream>(around, limits);
  DS_TRY(copies->prepare());
  return copies;
}

CopyStream::~CopyStream() {
  if (!busy()) return;
  for (gpu::RegisteredHost& half : registered_) half.abandon();
  buffer_.abandon();
  rows_.abandon();
}

Status CopyStream::prepare() {
  DS_ASSIGN(stream_, around_.device.make_stream());
  DS_ASSIGN(ready_, around_.device.make_event());
  DS_ASSIGN(settled_, around_.device.make_event());
  const Status registered = register_halves();
  if (registered) return {};
  log::warn("writer halves_not_registered device=\"{}\" segment={} buffer_bytes={} why=\"{}\"", device_name(),
            around_.segment->path().name, limits_.bounce_bytes * limits_.bounce_flights,
            registered.error().to_string());
  return make_buffer();
}

Status CopyStream::register_halves() {
  for (unsigned h = 0; h < shm::kHalves; ++h) {
    const MutByteSpan half = around_.segment->half(h);
    auto registered =
        gpu::RegisteredHost::make(around_.device, half.data(), half.size(), around_.segment, limits_.register_bytes);
    if (!registered) {
      registered_ = {};
      return std::move(registered).error();
    }
    registered_[h] = *std::move(registered);
  }
  return {};
}

Status CopyStream::make_buffer() {
  auto buffer = around_.device.pin(limits_.bounce_bytes * limits_.bounce_flights);
  if (!buffer)
    return std::move(buffer).error().with_context("the buffer for copies into halves that are not registered");
  buffer_ = std::move(buffer).value();
  for (std::size_t i = 0; i < limits_.bounce_flights; ++i) {
    Flight flight;
    flight.buffer = buffer_.data() + i * limits_.bounce_bytes;
    spare_.push_back(std::move(flight));
  }
  return {};
}

Status CopyStream::follow(gpu::StreamHandle stream) {
  DS_ASSIGN(const auto theirs, around_.device.adopt_stream(stream));
  DS_ASSIGN(const bool captured, theirs->is_captured());
  if (captured) {
    return Error(Errc::unsupported,
                 around_.device.name() +
                     ": a graph is being captured on the stream of the source; offload when that has "
                     "ended");
  }
  DS_TRY(theirs->record(*ready_));
  return stream_->wait_for(*ready_);
}

Result<CopyStream::Flight> CopyStream::take_flight() {
  Flight flight;
  if (!spare_.empty()) {
    flight = std::move(spare_.back());
    spare_.pop_back();
  }
  if (!flight.arrived) {
    auto event = around_.device.make_event();
    if (!event) {
      spare_.push_back(std::move(flight));
      return std::move(event).error();
    }
    flight.arrived = std::move(event).value();
  }
  return flight;
}

Status CopyStream::queue(const shm::Fill& fill, std::span<const CopyJob> jobs,
                         std::span<const BatchCounter::Part> parts, std::uint64_t ticket, Deadline deadline) {
  DS_TRY(poll());
  while (flights_.size() >= flights_max()) DS_TRY(wait_for_oldest(deadline));
  DS_ASSIGN(Flight flight, take_flight());
  flight.fill = fill;
  flight.ticket = ticket;
  flight.parts.assign(parts.begin(), parts.end());
  flights_.push_back(std::move(flight));
  if (auto entered = around_.role.enter_copy(fill); !entered) {
    spare_.push_back(std::move(flights_.back()));
    flights_.pop_back();
    return entered;
  }
  // From here on the bracket is open, and part of the flight may be under way even if the rest is refused.
  return put(flights_.back(), jobs);
}

Status CopyStream::put(Flight& flight, std::span<const CopyJob> jobs) {
  flight.recorded = false;
  flight.from_buffer.clear();
  std::byte* buffer = flight.buffer;
  for (const CopyJob& given : jobs) {
    DS_ASSIGN(const CopyJob job, in_rows(given));
    if (!bounces()) {
      DS_TRY(put_in_place(flight.fill.half, job));
      continue;
    }
    DS_TRY(stream_->copy_out_rows(buffer, job.row_bytes, job.from, job.from_stride, job.row_bytes, job.rows));
    flight.from_buffer.push_back({job.to, job.to_stride, buffer, job.row_bytes, job.rows, job.row_bytes});
    buffer += job.rows * job.row_bytes;
  }
  DS_TRY(stream_->record(*flight.arrived));
  flight.recorded = true;
  return {};
}

/// The stream does what follows in order: the memory is used again when the copy of what was in it is done.
Result<CopyJob> CopyStream::in_rows(const CopyJob& job) {
  if (job.from_col_stride == 0 || job.rows == 0 || job.row_bytes == 0) return job;
  if (rows_.bytes() < job.bytes()) {
    auto rows = around_.device.allocate(std::max(flight_bytes_max(), job.bytes()));
    if (!rows) return std::move(rows).error().with_context("memory for sources whose columns lie apart");
    rows_ = *std::move(rows);
  }
  DS_TRY(stream_->launch(gpu::GatherMatrix{job.from, rows_.data(), job.rows, job.cols(), job.from_stride,
                                           job.from_col_stride, static_cast<std::uint32_t>(job.element_bytes)}));
  CopyJob dense = job;
  dense.from = rows_.data();
  dense.from_stride = job.row_bytes;
  dense.from_col_stride = 0;
  return dense;
}

Status CopyStream::put_in_place(unsigned half, const CopyJob& job) {
  if (job.rows == 0 || job.row_bytes == 0) return {};
  const gpu::RegisteredHost& registered = registered_[half];
  if (registered.in_one_part(job.to, (job.rows - 1) * job.to_stride + job.row_bytes)) {
    return stream_->copy_out_rows(job.to, job.to_stride, job.from, job.from_stride, job.row_bytes, job.rows);
  }
  for (std::uint64_t row = 0; row < job.rows; ++row) {
    std::byte* const to = job.to + row * job.to_stride;
    const std::byte* const from = job.from + row * job.from_stride;
    DS_TRY(registered.each_piece(to, job.row_bytes, [&](std::byte* at, std::uint64_t bytes) {
      return stream_->copy_out(at, from + (at - to), bytes);
    }));
  }
  return {};
}

Status CopyStream::poll() {
  while (busy() && flights_.front().recorded) {
    DS_ASSIGN(const bool arrived, flights_.front().arrived->done());
    if (!arrived) break;
    land_oldest();
  }
  return {};
}

Status CopyStream::wait(std::uint64_t ticket, Deadline deadline) {
  while (busy() && flights_.front().ticket <= ticket) DS_TRY(wait_for_oldest(deadline));
  return {};
}

Status CopyStream::wait_for_oldest(Deadline deadline) {
  if (!flights_.front().recorded) return Error(Errc::aborted, describe("a refusal broke off"));
  DS_TRY(gpu::wait(*flights_.front().arrived, deadline, describe("waiting for")));
  land_oldest();
  return {};
}

/// SYNC POINT progress: the event orders the device's bytes before the count, as the fence of copy() does a thread's.
void CopyStream::land_oldest() {
  around_.copier.copy(flights_.front().from_buffer);
  release(true);
}

void CopyStream::release(bool count) {
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  for (const BatchCounter::Part& part : flight.parts) {
    if (count) around_.role.add_progress(flight.fill, part.batch, part.elements);
  }
  around_.role.leave_copy(flight.fill);
  spare_.push_back(std::move(flight));
}

Status CopyStream::settle(Deadline deadline) {
  if (!busy()) return {};
  if (!settling_) {
    // Not the flights' own events: one that was refused half-way has none.
    DS_TRY(stream_->record(*settled_));
    settling_ = true;
  }
  DS_TRY(gpu::wait(*settled_, deadline, describe("waiting for the rest of")));
  settling_ = false;
  while (busy()) release(false);
  return {};
}

std::string CopyStream::describe(const char* what) const {
  return std::string(what) + " copies from " + device_name() + " into half " +
         std::to_string(flights_.front().fill.half);
}

}  // namespace deltasync
