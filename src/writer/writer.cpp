// One version: begin, write, commit or abort.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "base/label.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "shm/side_files.hpp"
#include "writer/session.hpp"

namespace deltasync {
namespace {

constexpr auto kNotifyLimit = std::chrono::milliseconds(100);
constexpr auto kArrivalLimit = std::chrono::seconds(2);  ///< to take the digests of a large model
constexpr auto kAbortSettleLimit = std::chrono::seconds(1);
constexpr std::uint64_t kGroupElementsMax = 32u << 20;  ///< of small slices in one copy bracket: an abort waits for it
constexpr std::size_t kGroupSlicesMax = 1u << 16;
constexpr std::size_t kTensorsAhead = 16;
constexpr std::uintptr_t kLowestAddress = 4096;  ///< nothing is mapped below
constexpr std::uint64_t kCopyTracedNs = 50'000;  ///< shorter write() calls have no span of their own

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

Status WriterSession::check_process() const {
  if (fork_guard_.same_process()) return {};
  return Error(Errc::invalid_argument, who() + " was attached by pid " + std::to_string(fork_guard_.pid()) +
                                           ": a forked child attaches a writer of its own");
}

Status WriterSession::begin(const Version& version, const CallOptions& call) {
  const StopScope stopping(*this, call.stop);
  const Deadline deadline = Deadline::of(call);
  DS_TRY(check_process());
  const std::string context = "begin " + to_string(version);
  if (fill_) return Error(Errc::invalid_argument, context + ": a fill is open already");
  if (options_.writers > 1 && !planned_) {
    return Error(Errc::invalid_argument, context + ": with several writers each registers its plan first");
  }
  if (!labels_of_trainers_) DS_TRY(check_no_other_number(version).with_context(context));
  const auto start = Clock::now();
  const std::uint64_t start_ns = trace::now_ns();
  const trace::Span span("guard", version.id);
  trace::name_version(version);
  DS_TRY(settle_before(version, deadline));
  // The fill itself needs no agent. But one that was restarted may have another segment for us: one look, no wait.
  if (auto status = greet(deadline); !status) return std::move(status).with_context(context);
  auto fill = role_->begin(version, {deadline, stop_});
  if (!fill) {
    const bool alone = !link_.connected();
    auto error = std::move(fill).error();
    if (alone) error = Error(error.code(), error.message() + " (the agent is not connected)");
    return error;
  }
  fill_ = *fill;
  began_ = start;
  began_ns_ = start_ns;
  report_ = OffloadReport{};
  report_.version = version;
  report_.guard_s = seconds_since(start);
  ++fills_;
  copier_.set_steady(fills_ > shm::kHalves);  // before, pages of a half may be new to this process
  failed_ = false;
  changed_ = false;
  coverage_.reset();
  return {};
}

namespace {

/// Of a source whose elements lie apart in a row. Rows may lie closer than columns.
Status check_columns(const Tensor& tensor, const Rect& rect, const Source& source) {
  const std::string context = "write " + tensor.spec.name + ": ";
  if (source.col_stride_bytes < tensor.element_bytes ||
      (rect.rows > 1 && source.row_stride_bytes < tensor.element_bytes)) {
    return Error(Errc::invalid_argument, context + "strides of " + std::to_string(source.row_stride_bytes) + " and " +
                                             std::to_string(source.col_stride_bytes) +
                                             " bytes: beside a column stride both are given, of an element at least");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(source.data);
  if (!source.device.is_host() &&
      (address | source.row_stride_bytes | source.col_stride_bytes) % tensor.element_bytes != 0) {
    return Error(Errc::invalid_argument, context + "beside a column stride a device's elements are aligned to " +
                                             std::to_string(tensor.element_bytes) + " bytes, and these are not");
  }
  return {};
}

}  // namespace

Status WriterSession::check_source(const Tensor& tensor, const Rect& rect, const Source& source) const {
  const std::uint64_t row_bytes = rect.cols * tensor.element_bytes;
  // A view of memory that was given up keeps its offset.
  if (const auto address = reinterpret_cast<std::uintptr_t>(source.data);
      address < kLowestAddress && rect.elements() != 0) {
    return Error(Errc::invalid_argument,
                 "write " + tensor.spec.name + ": the source has no memory (address " + std::to_string(address) + ")");
  }
  if (source.col_stride_bytes != 0 && rect.cols > 1) return check_columns(tensor, rect, source);
  if (source.row_stride_bytes != 0 && source.row_stride_bytes < row_bytes && rect.rows > 1) {
    return Error(Errc::invalid_argument, "write " + tensor.spec.name + ": a row stride of " +
                                             std::to_string(source.row_stride_bytes) + " bytes is less than a row of " +
                                             std::to_string(row_bytes));
  }
  return {};
}

Status WriterSession::write(std::uint32_t tensor, const Rect& rect, const Source& source) {
  const SliceSource item{{tensor, rect}, source};
  return write(std::span(&item, 1));
}

Status WriterSession::write(std::span<const SliceSource> batch) {
  DS_TRY(check_open("write"));
  const auto start = Clock::now();
  const std::uint64_t bytes_before = report_.bytes;
  trace::Span span("copy", report_.version.id);
  span.drop_if_shorter(kCopyTracedNs);
  failed_ = true;  // until everything below went well
  DS_TRY(write_runs(batch));
  report_.copy_s += seconds_since(start);
  failed_ = false;
  span.set({"bytes", report_.bytes - bytes_before});
  return {};
}

Status WriterSession::check_open(const char* call) const {
  DS_TRY(check_process());
  if (!fill_) return Error(Errc::invalid_argument, std::string(call) + ": no fill is open");
  if (failed_) return Error(Errc::aborted, std::string(call) + ": an earlier write of this fill failed; abort() it");
  return {};
}

/// Neighbours in the same kind of memory at a time.
Status WriterSession::write_runs(std::span<const SliceSource> batch) {
  while (!batch.empty()) {
    const bool on_host = batch.front().source.device.is_host();
    const auto end = std::find_if(batch.begin(), batch.end(), [on_host](const SliceSource& item) {
      return item.source.device.is_host() != on_host;
    });
    const auto run = batch.first(static_cast<std::size_t>(end - batch.begin()));
    if (on_host) {
      DS_TRY(copy_streams_->poll());
      DS_TRY(write_groups(run));
    } else {
      DS_TRY(open_copy_streams(run));  // which registers the halves: for large ones that takes longer than copies may
      const Deadline deadline = Deadline::after(options_.device_timeout);
      DS_TRY(queue_runs(run, deadline));
      DS_TRY(copy_streams_->wait(tickets_, deadline));
    }
    batch = batch.subspan(run.size());
  }
  return {};
}

Status WriterSession::write_groups(std::span<const SliceSource> batch) {
  while (!batch.empty()) {
    std::size_t slices = 0;
    const std::size_t slices_max = std::min(batch.size(), kGroupSlicesMax);
    for (std::uint64_t elements = 0; slices < slices_max && elements < kGroupElementsMax; ++slices) {
      elements += batch[slices].slice.rect.elements();
    }
    DS_TRY(write_group(batch.first(slices)));
    batch = batch.subspan(slices);
  }
  return {};
}

/// With very many small tensors the look at each one's place waits for memory longer than the copy of its bytes.
void WriterSession::prefetch_tensor(std::span<const SliceSource> group, std::size_t i) const {
  if (i >= group.size() || group[i].slice.tensor >= layout_->tensors().size()) return;
  const Tensor& tensor = layout_->tensors()[group[i].slice.tensor];
  __builtin_prefetch(&tensor.rows);
  __builtin_prefetch(&tensor.tile_count);
}

/// In one copy bracket.
Status WriterSession::write_group(std::span<const SliceSource> group) {
  jobs_.clear();
  progress_.clear();
  for (std::size_t i = 0; i < group.size(); ++i) {
    prefetch_tensor(group, i + kTensorsAhead);
    DS_ASSIGN(const CopyJob job, accept(group[i]));
    jobs_.push_back(job);
    progress_.add(group[i].slice.tensor, group[i].slice.rect);
  }
  DS_TRY(role_->enter_copy(*fill_));
  copier_.copy(jobs_);
  for (const BatchCounter::Part& part : progress_.parts()) role_->add_progress(*fill_, part.batch, part.elements);
  role_->leave_copy(*fill_);
  return {};
}

/// Checks one slice, counts it as written, and says what to copy.
Result<CopyJob> WriterSession::accept(const SliceSource& item) {
  const auto& [tensor, rect] = item.slice;
  if (tensor >= layout_->tensors().size()) {
    return Error(Errc::out_of_range,
                 "write: tensor " + std::to_string(tensor) + " of " + std::to_string(layout_->tensors().size()));
  }
  if (auto accepted = coverage_.add(tensor, rect); !accepted) {
    return std::move(accepted).error().with_context("write to " + to_string(report_.version));
  }
  const Tensor& t = layout_->tensors()[tensor];
  DS_TRY(check_source(t, rect, item.source));
  const auto row_bytes = static_cast<std::size_t>(rect.cols * t.element_bytes);
  report_.bytes += rect.rows * row_bytes;
  if (touched_[tensor] != fills_) {
    touched_[tensor] = fills_;
    ++report_.tensors;
  }
  const auto width = static_cast<std::size_t>(t.element_bytes);
  const bool apart = item.source.col_stride_bytes != 0 && item.source.col_stride_bytes != width && rect.cols > 1;
  return CopyJob{segment_->half(fill_->half).data() + t.offset + rect.row * t.row_bytes() + rect.col * t.element_bytes,
                 static_cast<std::size_t>(t.row_bytes()),
                 static_cast<const std::byte*>(item.source.data),
                 item.source.row_stride_bytes != 0 ? item.source.row_stride_bytes : row_bytes,
                 rect.rows,
                 row_bytes,
                 apart ? item.source.col_stride_bytes : 0,
                 width};
}

Result<OffloadReport> WriterSession::commit(const CallOptions& call) {
  const StopScope stopping(*this, call.stop);
  auto report = seal(Deadline::of(call));
  if (report) {
    trace::record("offload", report->version.id, began_ns_, trace::now_ns(),
                  {{"bytes", report->bytes}, {"tensors", report->tensors}});
  }
  return report;
}

Result<OffloadReport> WriterSession::seal(Deadline deadline) {
  DS_TRY(check_process());
  if (!fill_) return Error(Errc::invalid_argument, "commit: no fill is open");
  const std::string context = "commit " + to_string(report_.version);
  const trace::Span span("seal", report_.version.id);
  const auto start = Clock::now();
  if (failed_) {
    abort();
    return Error(Errc::aborted, context + ": an earlier write failed");
  }
  if (auto complete = changed_ ? Status() : coverage_.finish(); !complete) {
    abort();
    return std::move(complete).error().with_context(context);
  }
  if (auto arrived = copy_streams_->wait(tickets_, deadline); !arrived) {
    abort_fill(deadline);
    return std::move(arrived).error().with_context(context);
  }
  if (is_orphaned()) {
    abort();
    return Error(Errc::aborted, context + ": the agent was restarted without the segment, and has another one");
  }
  if (auto sealed = role_->commit(*fill_, {deadline, stop_}); !sealed) {
    abort();
    return std::move(sealed).error().with_context(context);
  }
  fill_.reset();
  report_.seal_s = seconds_since(start);
  report_copy_form();
  report_.total_s = seconds_since(began_);
  const auto ns = [](double seconds) { return static_cast<std::uint64_t>(seconds * 1e9); };
  link_.notify({ns(report_.total_s), ns(report_.guard_s)}, deadline.earlier(Deadline::after(kNotifyLimit)));
  return report_;
}

void WriterSession::report_copy_form() {
  const Copier::InUse form = copier_.form();
  if (!form.chosen) return;
  report_.copy_form = form.name;
  if (std::exchange(form_logged_, form.name) != form.name) {
    log::info("copy_form_chosen form=\"{}\" threads={}", form.name, copier_.threads());
  }
}

void WriterSession::abort() noexcept {
  abort_fill(Deadline::after(kAbortSettleLimit));
}

Status WriterSession::wait_ready(const VersionId& version, const CallOptions& call) {
  const StopScope stopping(*this, call.stop);
  const Deadline deadline = Deadline::of(call);
  DS_TRY(check_process());
  const trace::Span span("wait ready", version);
  for (;;) {
    Status status = ensure_connected(deadline);
    if (status) {
      auto ready = link_.wait_ready(version, deadline);
      if (ready) return {};
      status = std::move(ready).error();
    }
    if (status.error().code() == Errc::connection && !deadline.passed()) continue;
    return std::move(status).with_context("wait for " + to_string(version));
  }
}

std::optional<HeldVersion> WriterSession::held() const {
  if (!fork_guard_.same_process()) return std::nullopt;
  for (;;) {
    // Ends soon: a half moves a few times per version.
    const VersionId id = role_->newest();
    if (!id.valid()) return std::nullopt;
    for (unsigned half = 0; half < shm::kHalves; ++half) {
      const shm::HalfStatus status = shm::inspect_half(*segment_, half);
      if (status.version.id != id) continue;  // one that is being filled comes after it
      return HeldVersion{status.version,
                         segment_->half(half).first(static_cast<std::size_t>(layout_->half_bytes())),
                         {half, status.sequence}};
    }
  }
}

std::optional<HeldVersion> held_version(const Writer& writer) {
  const auto* const session = dynamic_cast<const WriterSession*>(&writer);
  return session != nullptr ? session->held() : std::nullopt;
}

void WriterSession::tell_parents(wire::TrainerParents parents) {
  link_.tell_parents(std::move(parents), Deadline::after(kNotifyLimit));
}

std::uint64_t agent_instance(const Writer& writer) {
  const auto* const session = dynamic_cast<const WriterSession*>(&writer);
  return session != nullptr ? session->agent_instance() : 0;
}

void take_labels_of_trainers(Writer& writer) {
  if (auto* const session = dynamic_cast<WriterSession*>(&writer)) session->take_labels_of_trainers();
}

void tell_parents(Writer& writer, wire::Parents parents) {
  if (auto* const session = dynamic_cast<WriterSession*>(&writer)) session->tell_parents({std::move(parents)});
}

void WriterSession::tell_arrival(const wire::TrainerArrival& arrival, int memory) {
  UniqueFd copy(::fcntl(memory, F_DUPFD_CLOEXEC, 0));
  if (copy) link_.tell_arrival(arrival, std::move(copy), Deadline::after(kArrivalLimit));
}

void WriterSession::end_arrival(bool tell) noexcept {
  if (tell && fork_guard_.same_process()) {
    link_.end_arrival(Deadline::after(kNotifyLimit));
  } else {
    link_.forget_arrival();
  }
}

void WriterSession::look_for_agent() {
  if (!fill_) static_cast<void>(greet(Deadline::after(kArrivalLimit)));
}

void tell_arrival(Writer& writer, const wire::TrainerArrival& arrival, int memory) {
  if (auto* const session = dynamic_cast<WriterSession*>(&writer)) session->tell_arrival(arrival, memory);
}

void end_arrival(Writer& writer, bool tell) noexcept {
  if (auto* const session = dynamic_cast<WriterSession*>(&writer)) session->end_arrival(tell);
}

Status WriterSession::tell_delta(const wire::TrainerDelta& delta) {
  if (!fork_guard_.same_process()) return Error(Errc::connection, "a forked child");
  return link_.tell(delta, Deadline::after(kNotifyLimit));
}

Status WriterSession::tell_frames(const wire::TrainerFrames& frames, Deadline deadline) {
  if (!fork_guard_.same_process()) return Error(Errc::connection, "a forked child");
  return link_.tell(frames, deadline);
}

Status tell_delta(Writer& writer, const wire::TrainerDelta& delta) {
  auto* const session = dynamic_cast<WriterSession*>(&writer);
  return session != nullptr ? session->tell_delta(delta) : Error(Errc::unsupported, "this writer has no agent");
}

Status tell_frames(Writer& writer, const wire::TrainerFrames& frames, Deadline deadline) {
  auto* const session = dynamic_cast<WriterSession*>(&writer);
  return session != nullptr ? session->tell_frames(frames, deadline)
                            : Error(Errc::unsupported, "this writer has no agent");
}

void look_for_agent(Writer& writer) {
  if (auto* const session = dynamic_cast<WriterSession*>(&writer)) session->look_for_agent();
}

std::optional<FillOfHalf> WriterSession::open_fill() const {
  if (!fill_) return std::nullopt;
  return FillOfHalf{fill_->half, fill_->sequence};
}

std::optional<FillOfHalf> open_fill(const Writer& writer) {
  const auto* const session = dynamic_cast<const WriterSession*>(&writer);
  return session != nullptr ? session->open_fill() : std::nullopt;
}

/// Counts no progress: what is changed in place is no batch that the agent might read before the seal.
Status WriterSession::change_fill(const std::function<Status(std::span<std::byte> half)>& change) {
  DS_TRY(check_open("change"));
  failed_ = true;  // until everything below went well
  DS_TRY(role_->enter_copy(*fill_));
  Status changed = change(segment_->half(fill_->half).first(static_cast<std::size_t>(layout_->half_bytes())));
  role_->leave_copy(*fill_);
  DS_TRY(changed);
  failed_ = false;
  changed_ = true;
  return {};
}

Status change_fill(Writer& writer, const std::function<Status(std::span<std::byte> half)>& change) {
  auto* const session = dynamic_cast<WriterSession*>(&writer);
  if (session == nullptr) return Error(Errc::unsupported, "change: another kind of writer");
  return session->change_fill(change);
}

Status hand_over_delta(const Writer& writer, std::span<const ByteSpan> pieces) {
  const auto* const session = dynamic_cast<const WriterSession*>(&writer);
  if (session == nullptr) return Error(Errc::unsupported, "hand over: another kind of writer");
  withdraw_delta(writer);  // of a version before that came to nothing
  return shm::write_side_file(shm::side_file_path(session->segment_path(), shm::kHandedSideFile), pieces);
}

void withdraw_delta(const Writer& writer) noexcept {
  const auto* const session = dynamic_cast<const WriterSession*>(&writer);
  if (session == nullptr) return;
  try {
    ::unlink(shm::side_file_path(session->segment_path(), shm::kHandedSideFile).c_str());
  } catch (const std::exception&) {  // no memory for its name: the agent finds that it leads elsewhere
  }
}

std::span<const std::byte> WriterSession::filling() const {
  if (!fork_guard_.same_process() || !fill_) return {};
  return segment_->half(fill_->half).first(static_cast<std::size_t>(layout_->half_bytes()));
}

Status Writer::write(std::uint32_t tensor, const Source& source) {
  const auto tensors = layout()->tensors();
  if (tensor >= tensors.size()) {
    return Error(Errc::out_of_range,
                 "write: tensor " + std::to_string(tensor) + " of " + std::to_string(tensors.size()));
  }
  return write(tensor, Rect{0, 0, tensors[tensor].rows, tensors[tensor].cols}, source);
}

Status Writer::write(std::string_view tensor, const Source& source) {
  const auto index = layout()->find(tensor);
  if (!index) return Error(Errc::not_found, "write: the layout has no tensor '" + std::string(tensor) + "'");
  return write(*index, source);
}

}  // namespace deltasync
