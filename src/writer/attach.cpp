// Attaching: the session's beginning, its connection to the agent, and the mapping of the segment that the agent names.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/process.hpp"
#include "format/packed_layout.hpp"
#include "writer/orphaned_copies.hpp"
#include "writer/session.hpp"

namespace deltasync {
namespace {

constexpr auto kGreetLimit = std::chrono::milliseconds(500);  ///< for an agent that listens but is slow to answer
constexpr unsigned kThreadsDefaultMax = 4;

unsigned choose_threads(unsigned wanted) {
  return wanted != 0 ? wanted : std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsDefaultMax);
}

Result<wire::TrainerHello> make_hello(const Layout& layout, const Sidecar& sidecar, const WriterOptions& options) {
  wire::TrainerHello hello;
  hello.writer_index = options.writer_index;
  hello.writers = options.writers;
  hello.pid = ProcessId::self().pid;
  hello.name = options.name;
  DS_ASSIGN(hello.layout,
            wire::pack_layout(layout.encode(), sidecar.empty() ? std::vector<std::byte>{} : sidecar.encode()));
  return hello;
}

bool is_same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

WriterSession::WriterSession(SlotClaim claim, LayoutPtr layout, WriterOptions options, Devices devices,
                             const wire::TrainerHello& hello)
    : claim_(std::make_unique<SlotClaim>(std::move(claim))),
      layout_(std::move(layout)),
      options_(std::move(options)),
      copier_(choose_threads(options_.threads), "ds-copy"),
      coverage_(layout_),
      progress_(layout_),
      touched_(layout_->tensors().size(), 0),
      link_(options_.agent_socket, hello),
      copy_streams_(std::make_unique<CopyStreams>(std::move(devices.finder), devices.limits)) {}

WriterSession::~WriterSession() {
  if (!fork_guard_.same_process()) {
    static_cast<void>(
        copy_streams_.release());  // a forked child cannot use its parent's devices, not even to give back
    return;
  }
  abort();
  if (!copy_streams_->busy()) return;
  log::warn("writer ended_under_device_copies slot={} segment={}", options_.writer_index, segment_->path().name);
  keep_orphaned({std::move(claim_), std::move(segment_), std::move(role_), std::move(copy_streams_)});
}

Status WriterSession::open(Deadline deadline) {
  DS_ASSIGN(Attached attached, link_.reconnect(deadline));
  return use(std::move(attached));
}

/// Maps what the agent handed over, unless it is mapped already. Never during a fill. By the file and not by its name,
/// which may be gone, or another's, and may not be visible from here.
Status WriterSession::use(Attached attached) {
  const wire::TrainerWelcome& welcome = attached.welcome;
  epoch_heard_ = welcome.epoch;
  agent_instance_ = welcome.instance;
  const shm::SegmentPath path{welcome.shm_dir, welcome.segment_name};
  if (!attached.segment) return Error(Errc::protocol, "the agent named segment " + path.name + " without its file");
  if (segment_ && is_same_file(segment_->file(), attached.segment.get())) return {};
  if (fill_) return Error(Errc::aborted, "the agent has a new segment; the open fill is of an old one");
  DS_ASSIGN(auto segment, shm::Segment::attach(std::move(attached.segment), path));
  if (segment->layout_digest() != layout_->digest() || segment->half_bytes() != layout_->half_bytes()) {
    const auto describe = [](const Digest128& digest, std::uint64_t half_bytes) {
      return to_string(digest) + " with halves of " + std::to_string(half_bytes) + " bytes";
    };
    return Error(Errc::layout_mismatch, "segment " + path.name + " is of layout " +
                                            describe(segment->layout_digest(), segment->half_bytes()) +
                                            ", this writer has " + describe(layout_->digest(), layout_->half_bytes()));
  }
  if (segment->batches() != progress_.batches()) {
    return Error(Errc::corrupt, "segment " + path.name + " counts " + std::to_string(segment->batches()) +
                                    " batches, its layout has " + std::to_string(progress_.batches()));
  }
  if (copy_streams_->busy()) {
    return Error(Errc::quarantined, "the agent has a new segment; a device may still write into the old one");
  }
  copy_streams_->close();
  role_.reset();
  segment_ = std::move(segment);
  role_ = std::make_unique<shm::WriterRole>(*segment_, options_.writer_index, options_.writers);
  return {};
}

Status WriterSession::take_up(Attached attached, Deadline deadline) {
  Status used = use(std::move(attached));
  // A restarted agent knows no plans, and a writer that is replaced is judged by all of them.
  if (used && planned_ && options_.writers > 1) used = link_.restore_plan(plan_, deadline);
  if (!used) link_.close();
  return used;
}

bool WriterSession::is_orphaned() const {
  if (link_.connected() || segment_->in_place()) return false;
  std::error_code ec;
  return std::filesystem::exists(segment_->path().dir / segment_->path().name, ec);
}

Status WriterSession::ensure_connected(Deadline deadline) {
  if (link_.connected()) return {};
  DS_ASSIGN(Attached attached, link_.reconnect(deadline));
  return take_up(std::move(attached), deadline);
}

/// Connects if nobody is and somebody listens; an absent agent is no error.
Status WriterSession::greet(Deadline deadline) {
  if (link_.connected()) return {};
  const Deadline limit = deadline.earlier(Deadline::after(kGreetLimit));
  Status greeted = [&]() -> Status {
    DS_ASSIGN(Attached attached, link_.connect(limit));
    return take_up(std::move(attached), limit);
  }();
  if (greeted) return greeted;
  const Errc code = greeted.error().code();
  if (code == Errc::connection || code == Errc::timed_out || code == Errc::cancelled) return {};
  return greeted;
}

WriterSession::StopScope::StopScope(WriterSession& session, const std::stop_token& stop) : session_(session) {
  stop_on(stop);
}

WriterSession::StopScope::~StopScope() {
  stop_on({});
}

void WriterSession::StopScope::stop_on(const std::stop_token& stop) {
  if (!session_.fork_guard_.same_process()) return;
  session_.link_.stop_on(stop);
  session_.stop_ = stop;
}

Status WriterSession::register_plan(std::span<const TensorSlice> plan, const CallOptions& call) {
  const StopScope stopping(*this, call.stop);
  const Deadline deadline = Deadline::of(call);
  DS_TRY(check_process());
  if (fill_) return Error(Errc::invalid_argument, "register_plan: a fill is open");
  planned_ = false;
  coverage_.clear_plan();
  plan_.assign(plan.begin(), plan.end());
  for (;;) {
    Status status = ensure_connected(deadline);
    if (status) status = link_.register_plan(plan_, deadline);
    if (!status) {
      // The agent went away while it had the question: ask the next one.
      if (status.error().code() == Errc::connection && !deadline.passed()) continue;
      return std::move(status).with_context("register_plan of " + who());
    }
    break;
  }
  DS_TRY(coverage_.set_plan(plan_));
  planned_ = true;
  return {};
}

Result<std::unique_ptr<Writer>> Writer::attach(LayoutPtr layout, const Sidecar& sidecar, WriterOptions options,
                                               const CallOptions& call) {
  return WriterSession::attach(std::move(layout), sidecar, std::move(options), {cuda_devices(), {}}, call);
}

Result<std::unique_ptr<Writer>> WriterSession::attach(LayoutPtr layout, const Sidecar& sidecar, WriterOptions options,
                                                      Devices devices, const CallOptions& call) {
  if (options.writers == 0 || options.writers > shm::kSlotsMax || options.writer_index >= options.writers) {
    return Error(Errc::invalid_argument, "attach: writer " + std::to_string(options.writer_index) + " of " +
                                             std::to_string(options.writers) + "; 1 to " +
                                             std::to_string(shm::kSlotsMax) + " writers are possible");
  }
  const std::string context = "attach writer " + std::to_string(options.writer_index) + " to " + options.agent_socket;
  auto hello = make_hello(*layout, sidecar, options);
  if (!hello) return std::move(hello).error().with_context(context);
  sweep_orphaned_copies();
  auto claim = SlotClaim::take(options.agent_socket, options.writer_index);
  if (!claim) return std::move(claim).error().with_context(context);
  std::unique_ptr<WriterSession> session;
  try {
    session = std::make_unique<WriterSession>(std::move(*claim), std::move(layout), std::move(options),
                                              std::move(devices), *hello);
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, context + ": the copy threads: " + e.code().message());
  }
  const StopScope stopping(*session, call.stop);
  if (auto opened = session->open(Deadline::of(call)); !opened) return std::move(opened).error().with_context(context);
  return std::unique_ptr<Writer>(std::move(session));
}

}  // namespace deltasync
