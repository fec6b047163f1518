#include "agent/trainer/trainer_conversation.hpp"

#include <algorithm>
#include <utility>

#include "agent/trainer/trainer_socket.hpp"
#include "base/bytes.hpp"
#include "base/log.hpp"
#include "format/handshake.hpp"
#include "format/packed_layout.hpp"
#include "format/wire_local.hpp"
#include "net/coroutine.hpp"
#include "net/peer_user.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;
using asio::awaitable;

namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(100);  ///< between looks at ready() without a signal

Deadline bounded(std::chrono::steady_clock::time_point since, std::uint64_t deadline_ms,
                 std::chrono::milliseconds limit) {
  const auto most = static_cast<std::uint64_t>(limit.count());
  return Deadline(since + std::chrono::milliseconds(std::min(deadline_ms, most)));
}

Error stopping() {
  return {Errc::connection, "the agent is stopping"};
}
Error taken_over() {
  return {Errc::connection, "the process attached again on another connection"};
}
Error layout_replaced() {
  return {Errc::layout_mismatch, "the layout was replaced: attach again"};
}

}  // namespace

/// What the setup thread found out for one hello.
struct TrainerConversation::Admission {
  LayoutPtr layout;
  OpenSegment segment;
  std::uint64_t grant = 0;
};

TrainerConversation::TrainerConversation(TrainerState& state, asio::generic::stream_protocol::socket socket,
                                         std::uint64_t connection)
    : state_(state), peer_(watch_peer(socket.native_handle())), stream_(std::move(socket)), connection_(connection) {}

awaitable<void> TrainerConversation::run() {
  Status status;
  try {
    status = co_await talk();
  } catch (const std::exception& e) {
    status = Error(Errc::internal, e.what());
  }
  state_.connection_closed(connection_);
  if (relays_ && !state_.stopped) state_.hooks.relay_gone(connection_);
  if (!state_.stopped && !status && status.error().code() != Errc::connection) {
    log::warn("trainer_refused error=\"{}\"", status.error().to_string());
    static_cast<void>(co_await send_error(request_, status.error()));
  }
  stream_.close();
}

/// hello, then requests until the end.
awaitable<Status> TrainerConversation::talk() {
  const auto limit = state_.options.message_limit;
  DS_CO_ASSIGN(const net::Message first,
               co_await stream_.read(wire::kLayoutBytesMax, Deadline::after(state_.options.hello_limit), limit));
  request_ = first.header.request;
  if (first.type() == wire::Type::map_segment) co_return co_await hand_out_segment(first);
  if (!peer_) co_return std::move(peer_).error();
  if (first.type() != wire::Type::trainer_hello) {
    co_return Error(Errc::protocol, "the first message must be trainer_hello");
  }
  DS_CO_ASSIGN(protocol_, wire::check_protocol(first.payload, "the trainer"));
  DS_CO_ASSIGN(const auto hello, wire::decode_handshake<wire::TrainerHello>(first.payload, "the trainer"));
  Greeting greeting;
  DS_CO_ASSIGN(const TrainerPtr trainer, co_await admit(hello, std::move(*peer_), greeting));
  DS_CO_TRY(co_await greet(std::exchange(request_, 0), greeting));
  greeting.segment.reset();
  stream_.accept_files();
  while (!state_.stopped) {
    const Deadline idle = Deadline::after(state_.options.idle_limit);
    DS_CO_ASSIGN(const net::Message message, co_await stream_.read(wire::kDigestsBytesMax, idle, limit));
    DS_CO_ASSIGN(const bool more, co_await serve(trainer, message));
    if (!more) break;
  }
  co_return Status();
}

/// A receiver maps what it gets, and goes. No matter in which PID namespace it is: nobody waits for its death.
awaitable<Status> TrainerConversation::hand_out_segment(const net::Message& message) {
  DS_CO_TRY(net::check_peer_user(stream_.fd(), "the receiver", "this agent"));
  DS_CO_TRY(wire::check_protocol(message.payload, "the receiver"));
  DS_CO_ASSIGN(const auto asked, wire::MapSegment::decode(message.payload));
  if (asked.instance != state_.options.instance) {
    co_return co_await send_error(request_, Error(Errc::peer_died, "another agent serves this socket"));
  }
  const Result<UniqueFd> file = state_.hooks.segment_to_read(asked.generation);
  if (!file) co_return co_await send_error(request_, file.error());
  co_return co_await stream_.write_with_file(wire::Type::segment, request_, {}, file->get(),
                                             state_.options.message_limit);
}

// ---- attaching ---------------------------------------------------------------------------------------------------

Result<TrainerConversation::Admission> TrainerConversation::open(const wire::TrainerHello& hello, const ProcessId& peer,
                                                                 bool connected_besides) {
  Admission admission;
  DS_ASSIGN(const wire::UnpackedLayout unpacked, wire::unpack_layout(hello.layout));
  admission.layout = unpacked.layout;
  DS_ASSIGN(admission.segment,
            state_.hooks.open_segment(admission.layout, unpacked.layout_encoded, unpacked.sidecar_encoded,
                                      connected_besides ? ProcessId() : peer));
  DS_ASSIGN(ProcessWatch watch, ProcessWatch::open(peer));
  DS_ASSIGN(admission.grant,
            state_.hooks.grant(admission.segment.generation, hello.writer_index, hello.writers, std::move(watch)));
  return admission;
}

awaitable<Result<TrainerPtr>> TrainerConversation::admit(const wire::TrainerHello& hello, ProcessWatch peer,
                                                         Greeting& greeting) {
  if (hello.writers == 0 || hello.writers > shm::kSlotsMax || hello.writer_index >= hello.writers) {
    co_return Error(Errc::invalid_argument, "writer " + std::to_string(hello.writer_index) + " of " +
                                                std::to_string(hello.writers) + ": 1 to " +
                                                std::to_string(shm::kSlotsMax) + " writers are possible");
  }
  co_await state_.drop_dead();
  if (state_.stopped) co_return stopping();
  DS_CO_TRY(state_.may_attach(hello, peer.id()));
  const auto work = [this, &hello, id = peer.id(), besides = state_.is_connected(peer.id())] {
    return open(hello, id, besides);
  };
  DS_CO_ASSIGN(Admission opened, co_await state_.setup.run(work, Deadline::after(state_.options.wait_limit)));
  OpenSegment& segment = opened.segment;
  const struct DiscardedAtEnd {
    net::WorkThread& thread;
    LayoutPtr layout;
    ~DiscardedAtEnd() { thread.discard(std::move(layout)); }  // what takes long to be made takes long to be destroyed
  } brought{state_.setup, std::move(opened.layout)};
  if (state_.stopped) co_return stopping();
  const ProcessId process = peer.id();
  auto recorded = record(hello, segment.generation, std::move(peer));
  if (!recorded) {
    co_await state_.give_back(hello.writer_index, segment.generation, opened.grant, process);
    co_return std::move(recorded).error();
  }
  const TrainerPtr trainer = std::move(*recorded);
  trainer->grant = opened.grant;
  state_.use_board(segment.generation, brought.layout);
  trainer->writers = hello.writers;
  trainer->name = hello.name;
  state_.connect(trainer, connection_, [this] { return stream_.peer_closed(); });
  state_.publish();
  log::info("trainer_attached slot={} writers={} pid={} name=\"{}\" generation={}", trainer->slot, trainer->writers,
            trainer->watch.id().pid, trainer->name, trainer->generation);
  greeting.welcome = {segment.path.name, segment.path.dir.string(), segment.generation, segment.newest,
                      segment.epoch,     state_.options.instance};
  greeting.segment = std::move(segment.file);
  co_return trainer;
}

/// The segment itself, not only its name: the name may be gone, or another's.
awaitable<Status> TrainerConversation::greet(std::uint64_t request, const Greeting& greeting) {
  const auto limit = state_.options.message_limit;
  constexpr wire::Type kType = wire::TrainerWelcome::kType;
  const std::vector<std::byte> payload = greeting.welcome.encode(protocol_);
  if (protocol_ < 5 || !greeting.segment) co_return co_await stream_.write(kType, request, payload, limit);
  co_return co_await stream_.write_with_file(kType, request, payload, greeting.segment.get(), limit);
}

Result<TrainerPtr> TrainerConversation::record(const wire::TrainerHello& hello, std::uint64_t generation,
                                               ProcessWatch peer) {
  DS_TRY(state_.may_attach(hello, peer.id()));  // another hello may have been admitted meanwhile
  if (TrainerPtr there = state_.find(hello.writer_index); there && there->generation == generation) return there;
  return state_.enter(hello.writer_index, generation, std::move(peer));
}

// ---- requests ----------------------------------------------------------------------------------------------------

awaitable<Result<bool>> TrainerConversation::serve(const TrainerPtr& trainer, const net::Message& message) {
  const auto limit = state_.options.message_limit;
  const std::uint64_t request = message.header.request;
  if (trainer->connection != connection_) co_return taken_over();  // a goodbye here is no longer the slot's
  switch (message.type()) {
    case wire::Type::trainer_notify:
      state_.hooks.segment_changed();
      if (!relays_) state_.hooks.trains();
      if (protocol_ >= 5) {
        DS_CO_ASSIGN(const wire::TrainerNotify durations, wire::TrainerNotify::decode(message.payload));
        state_.hooks.offloaded(durations);
      }
      co_return true;
    case wire::Type::trainer_parents: {
      DS_CO_ASSIGN(wire::TrainerParents parents, wire::TrainerParents::decode(message.payload));
      relays_ = true;
      state_.hooks.relays(connection_, trainer->watch.id(), std::move(parents));
      co_return true;
    }
    case wire::Type::trainer_arrival: {
      relays_ = true;
      co_await take_arrival(trainer->generation, message.payload);
      co_return true;
    }
    case wire::Type::trainer_delta:
    case wire::Type::trainer_frames: {
      relays_ = true;
      take_delta(trainer->generation, message);
      co_return true;
    }
    case wire::Type::trainer_plan: {
      const Status verdict = co_await judge_plan(trainer, message.payload);
      if (verdict) {
        DS_CO_TRY(co_await stream_.write(wire::Type::trainer_plan_ok, request, {}, limit));
      } else {
        DS_CO_TRY(co_await send_error(request, verdict.error()));
      }
      co_return true;
    }
    case wire::Type::trainer_wait: {
      const auto ready = co_await await_ready(message.payload);
      if (ready) {
        DS_CO_TRY(co_await stream_.write(request, *ready, limit));
      } else {
        DS_CO_TRY(co_await send_error(request, ready.error()));
      }
      co_return true;
    }
    case wire::Type::end: {
      Error why(Errc::peer_died, trainer->who() + " said goodbye");
      co_await state_.drop(trainer, std::move(why));
      DS_CO_TRY(co_await stream_.write(wire::Type::end, request, {}, limit));
      co_return false;
    }
    default: co_return Error(Errc::protocol, wire::describe(message.header) + " is no trainer's");
  }
}

/// There is no answer: who hears of no version that arrives waits for one that is whole.
awaitable<void> TrainerConversation::take_arrival(std::uint64_t generation, ByteSpan payload) {
  auto memory = std::make_shared<UniqueFd>(stream_.take_file());
  const auto take = [this, generation, payload, memory]() -> Status {
    DS_ASSIGN(wire::TrainerArrival said, wire::TrainerArrival::decode(payload));
    return state_.hooks.arrives(connection_, generation, std::move(said), std::move(*memory));
  };
  const auto taken = co_await state_.setup.run(take, Deadline::after(state_.options.wait_limit));
  if (taken || state_.stopped) co_return;
  log::warn("arrival_refused error=\"{}\" effect=\"the version is served once it is whole\"",
            taken.error().to_string());
}

/// There is no answer here either: who hears of no delta waits for the version. It does not stand behind what takes
/// long, since a relay's pull waits until it has told its agent.
void TrainerConversation::take_delta(std::uint64_t generation, const net::Message& message) {
  const auto take = [&]() -> Status {
    if (message.type() == wire::Type::trainer_delta) {
      DS_ASSIGN(wire::TrainerDelta said, wire::TrainerDelta::decode(message.payload));
      return state_.hooks.delta_arrives(connection_, generation, std::move(said));
    }
    DS_ASSIGN(wire::TrainerFrames part, wire::TrainerFrames::decode(message.payload));
    return state_.hooks.frames_arrive(connection_, std::move(part));
  };
  const Status taken = take();
  if (taken) return;
  log::warn("arrival_refused error=\"{}\" effect=\"the version is served once it is whole\"",
            taken.error().to_string());
}

awaitable<Status> TrainerConversation::judge_plan(const TrainerPtr& trainer, ByteSpan payload) {
  const auto arrived = std::chrono::steady_clock::now();
  ByteReader beginning(payload);
  const auto deadline_ms = beginning.get<std::uint64_t>();  // the rest is read on the setup thread
  if (beginning.failed()) co_return wire::TrainerPlan::decode(payload, protocol_).error();
  const Deadline deadline = bounded(arrived, deadline_ms, state_.options.wait_limit);
  bool agreed = false;
  const auto read = [this, payload, &agreed]() -> Result<WriterPlanBoard::WriterPlan> {
    DS_ASSIGN(const wire::TrainerPlan message, wire::TrainerPlan::decode(payload, protocol_));
    agreed = message.agreed != 0;
    auto slices = std::make_shared<std::vector<TensorSlice>>();
    slices->reserve(message.rects.size());
    for (const auto& r : message.rects) slices->push_back({r.tensor, Rect{r.row, r.col, r.rows, r.cols}});
    return WriterPlanBoard::WriterPlan(std::move(slices));
  };
  Result<WriterPlanBoard::WriterPlan> plan = co_await state_.setup.run(read, deadline);
  if (!plan) {
    Error why = std::move(plan).error();
    if (why.code() != Errc::timed_out) co_return why;
    // Not even read: an agent that is busy is not all that may be missing.
    const WriterPlanBoard* there = state_.board_of(*trainer);
    const std::string absent = there == nullptr ? "" : there->missing_besides(trainer->slot, trainer->writers);
    co_return Error(Errc::timed_out, "the agent was busy with other plans or trainers until the deadline" +
                                         (absent.empty() ? "" : "; no plan yet from writer(s) " + absent));
  }
  if (trainer->connection != connection_) co_return taken_over();
  if (state_.find(trainer->slot) != trainer) co_return Error(Errc::peer_died, trainer->who() + " is gone");
  WriterPlanBoard* board = state_.board_of(*trainer);
  if (board == nullptr) co_return layout_replaced();
  if (agreed) {
    board->restore(trainer->slot, trainer->writers, std::move(*plan));
  } else {
    board->submit(trainer->slot, trainer->writers, std::move(*plan));
  }
  state_.judge();
  state_.publish();
  state_.wake_all();
  if (agreed) co_return Status();
  for (;;) {
    if (state_.stopped) co_return stopping();
    if (trainer->connection != connection_) co_return taken_over();
    board = state_.board_of(*trainer);
    if (board == nullptr) co_return layout_replaced();
    if (auto outcome = board->take_outcome(trainer->slot)) {
      state_.publish();
      co_return std::move(*outcome);
    }
    if (deadline.passed() || stream_.peer_closed()) {
      Error why = board->give_up(trainer->slot);
      state_.publish();
      co_return why;
    }
    co_await state_.change(deadline.earlier(Deadline::after(kPollInterval)));
  }
}

awaitable<Result<wire::TrainerReady>> TrainerConversation::await_ready(ByteSpan payload) {
  DS_CO_ASSIGN(const wire::TrainerWait wait, wire::TrainerWait::decode(payload));
  const Deadline deadline = bounded(std::chrono::steady_clock::now(), wait.deadline_ms, state_.options.wait_limit);
  for (;;) {
    if (state_.stopped) co_return stopping();
    DS_CO_ASSIGN(const std::optional<wire::TrainerReady> ready, state_.hooks.ready(wait.version));
    if (ready) co_return *ready;
    if (deadline.passed()) co_return Error(Errc::timed_out, to_string(wait.version) + " is not served yet");
    if (stream_.peer_closed()) co_return Error(Errc::connection, "the trainer left while it waited for a version");
    co_await state_.change(deadline.earlier(Deadline::after(kPollInterval)));
  }
}

awaitable<Status> TrainerConversation::send_error(std::uint64_t request, const Error& error) {
  // Named: g++ 12 destroys an aggregate temporary inside of a co_await expression twice.
  const wire::ErrorMessage message{error.code(), error.message()};
  co_return co_await stream_.write(request, message, state_.options.message_limit);
}

}  // namespace deltasync::agent
