// One strand holds all state; one thread ("trainer-setup") runs what may block. Each connection is a coroutine on the
// strand, and so is each wait for a writer's death. Invariants, asserted where they hold:
//   - a slot has at most one record, and a record's process is not known to be dead;
//   - a record goes away only by a goodbye or by the proof of death, never by a closed connection;
//   - no hook is called once the server is destroyed.
#include "agent/trainer_server.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/thread_pool.hpp>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "agent/log_exception.hpp"
#include "agent/trainer_plans.hpp"
#include "agent/trainer_socket.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "format/coverage.hpp"
#include "format/packed_layout.hpp"
#include "net/coroutine.hpp"
#include "net/message_stream.hpp"

namespace deltasync::agent {
namespace {

namespace asio = boost::asio;
using asio::awaitable;
using net::kAsTuple;
using Strand = asio::strand<asio::io_context::executor_type>;

constexpr auto kPollInterval = std::chrono::milliseconds(100);  ///< between looks at ready() without a signal
constexpr auto kAcceptPause = std::chrono::milliseconds(50);    ///< after accept failed, e.g. for want of descriptors

/// A writer process that holds a slot.
struct Trainer {
  Trainer(Strand& strand, ProcessWatch w, UniqueFd pidfd) : watch(std::move(w)), death(strand, pidfd.get()) {
    static_cast<void>(pidfd.release());  // the descriptor's now
  }
  static Result<std::shared_ptr<Trainer>> make(Strand& strand, ProcessWatch watch) {
    UniqueFd pidfd(::fcntl(watch.fd(), F_DUPFD_CLOEXEC, 0));
    if (!pidfd) return Error::from_errno("watch " + to_string(watch.id()), errno);
    return std::make_shared<Trainer>(strand, std::move(watch), std::move(pidfd));
  }

  std::uint32_t slot = 0;
  std::uint32_t writers = 0;
  std::uint64_t generation = 0;
  std::string name;
  std::uint64_t connection = 0;  ///< 0: the process lives, its connection does not
  ProcessWatch watch;
  asio::posix::stream_descriptor death;  ///< a pidfd: readable when dead

  std::string who() const { return "writer " + std::to_string(slot) + " (" + to_string(watch.id()) + ")"; }
};
using TrainerPtr = std::shared_ptr<Trainer>;  // shared by the table and by the coroutine that awaits its death

/// What the setup thread found out for one hello.
struct Admission {
  LayoutPtr layout;
  OpenSegment segment;
};

Deadline bounded(std::uint64_t deadline_ms, std::chrono::milliseconds limit) {
  const auto most = static_cast<std::uint64_t>(limit.count());
  return Deadline::after(std::chrono::milliseconds(std::min(deadline_ms, most)));
}

PlanBoard make_board(const LayoutPtr& layout) {
  return PlanBoard([layout](std::span<const TensorSlice> slices) { return check_coverage(*layout, slices); });
}

}  // namespace

struct TrainerServer::Impl : std::enable_shared_from_this<TrainerServer::Impl> {
  Impl(asio::io_context& io, TrainerHooks& h, TrainerServerOptions o)
      : hooks(h), options(std::move(o)), strand(asio::make_strand(io)), acceptor(strand), setup(1) {
    asio::post(setup, [] { set_thread_name("trainer-setup"); });
  }

  TrainerHooks& hooks;
  const TrainerServerOptions options;
  Strand strand;
  std::pair<dev_t, ino_t> socket_file{};  // constant once it listens
  std::atomic<bool> stopped{false};       // set on the strand

  // Used on the strand only.
  asio::local::stream_protocol::acceptor acceptor;
  std::map<std::uint32_t, TrainerPtr> trainers;  // by slot
  std::map<std::uint64_t, net::MessageStream::Canceller> connections;
  std::list<asio::steady_timer*> waiters;
  std::uint64_t next_connection = 1;
  std::uint64_t board_generation = 0;
  std::optional<PlanBoard> board;

  mutable std::mutex status_mutex;
  std::vector<TrainerStatus> published;  // protected by status_mutex

  asio::thread_pool setup;

  template <class Work>
  void spawn(Work&& work) {
    asio::co_spawn(strand, std::forward<Work>(work), log_exception("trainer_server"));
  }

  // ---- waiting and hopping ------------------------------------------------------------------------------------

  /// Until something changed, or the deadline. Wakes may be spurious: look again.
  awaitable<void> change(Deadline deadline) {
    asio::steady_timer timer(strand);
    timer.expires_at(deadline.at());
    const auto here = waiters.insert(waiters.end(), &timer);
    co_await timer.async_wait(kAsTuple);
    waiters.erase(here);
  }
  void wake_all() {
    for (auto* timer : waiters) timer->cancel();
  }
  /// Continues the coroutine on the setup thread; back() returns it to the strand. Nothing of the strand's state may
  /// be touched in between.
  auto to_setup() { return asio::post(asio::bind_executor(setup.get_executor(), asio::use_awaitable)); }
  auto back() { return asio::post(asio::bind_executor(strand, asio::use_awaitable)); }
  /// For what runs between the two: an exception would leave the coroutine on the setup thread.
  template <class Work>
  static auto no_throw(Work&& work) -> decltype(work()) {
    try {
      return work();
    } catch (const std::exception& e) {
      return Error(Errc::internal, e.what());
    }
  }

  void publish() {
    std::vector<TrainerStatus> list;
    for (const auto& [slot, t] : trainers) {
      const bool known = board && board_generation == t->generation;
      list.push_back({slot, t->writers, t->generation, t->watch.id().pid, t->name, t->connection != 0,
                      known && board->accepted(slot), known && board->waiting(slot)});
    }
    const std::lock_guard lock(status_mutex);
    published = std::move(list);
  }

  // ---- writers coming and going -------------------------------------------------------------------------------

  awaitable<void> drop(TrainerPtr trainer, Error why) {
    const auto found = trainers.find(trainer->slot);
    if (stopped || found == trainers.end() || found->second != trainer) co_return;
    spdlog::info("trainer_gone slot={} pid={} reason=\"{}\"", trainer->slot, trainer->watch.id().pid, why.message());
    trainers.erase(found);
    trainer->death.cancel();
    if (board && board_generation == trainer->generation) board->remove(trainer->slot, why);
    publish();
    wake_all();
    co_await to_setup();
    const Status told = no_throw([&]() -> Status {
      hooks.writer_gone(trainer->generation, trainer->slot);
      return {};
    });
    co_await back();
    if (!told) spdlog::error("trainer_gone slot={} error=\"{}\"", trainer->slot, told.error().to_string());
  }

  Error died(const Trainer& trainer) { return {Errc::peer_died, trainer.who() + " died"}; }

  awaitable<void> watch_death(TrainerPtr trainer) {
    while (!stopped && !trainer->watch.dead()) {
      const auto [ec] = co_await trainer->death.async_wait(asio::posix::stream_descriptor::wait_read, kAsTuple);
      if (ec) co_return;  // said goodbye, or stop()
    }
    Error why = died(*trainer);
    co_await drop(trainer, std::move(why));
  }

  /// Death may be proved before its event came round, e.g. when a trainer is restarted at once.
  awaitable<void> drop_dead() {
    std::vector<TrainerPtr> dead;
    for (const auto& [slot, t] : trainers) {
      if (t->watch.dead()) dead.push_back(t);
    }
    for (const auto& t : dead) {
      Error why = died(*t);
      co_await drop(t, std::move(why));
    }
  }

  /// Whether this process may have that slot, as far as the records tell.
  Status may_attach(const wire::TrainerHello& hello, const ProcessId& peer) const {
    for (const auto& [slot, t] : trainers) {
      if (slot == hello.writer_index && (t->watch.id() != peer || t->connection != 0)) {
        return Error(Errc::already_exists, t->who() + " is attached");
      }
      if (slot != hello.writer_index && t->writers != hello.writers) {
        return Error(Errc::already_exists, t->who() + " is attached as one of " + std::to_string(t->writers) +
                                               " writers, this one says " + std::to_string(hello.writers));
      }
    }
    return {};
  }

  /// On the setup thread.
  Result<Admission> open(const wire::TrainerHello& hello, const ProcessId& peer, bool connected_besides) {
    Admission admission;
    DS_ASSIGN(const wire::LayoutEncodings encodings, wire::unpack_layout(hello.layout));
    DS_ASSIGN(admission.layout, Layout::decode(encodings.layout));
    if (!encodings.sidecar.empty()) {
      if (auto sidecar = Sidecar::decode(encodings.sidecar, *admission.layout); !sidecar) {
        return std::move(sidecar).error();
      }
    }
    DS_ASSIGN(admission.segment, hooks.open_segment(admission.layout, encodings.layout, encodings.sidecar,
                                                    connected_besides ? ProcessId() : peer));
    DS_ASSIGN(ProcessWatch watch, ProcessWatch::open(peer));
    DS_TRY(hooks.grant(admission.segment.generation, hello.writer_index, hello.writers, std::move(watch)));
    return admission;
  }

  awaitable<Result<TrainerPtr>> admit(const wire::TrainerHello& hello, ProcessWatch peer, std::uint64_t connection,
                                      wire::TrainerWelcome& welcome) {
    if (hello.writers == 0 || hello.writers > shm::kSlotsMax || hello.writer_index >= hello.writers) {
      co_return Error(Errc::invalid_argument, "writer " + std::to_string(hello.writer_index) + " of " +
                                                  std::to_string(hello.writers) + ": 1 to " +
                                                  std::to_string(shm::kSlotsMax) + " writers are possible");
    }
    co_await drop_dead();
    if (stopped) co_return Error(Errc::connection, "the agent is stopping");
    DS_CO_TRY(may_attach(hello, peer.id()));
    const bool connected_besides = std::any_of(trainers.begin(), trainers.end(), [&](const auto& entry) {
      return entry.second->watch.id() == peer.id() && entry.second->connection != 0;
    });
    co_await to_setup();
    auto opened = no_throw([&] { return open(hello, peer.id(), connected_besides); });
    co_await back();
    if (!opened) co_return std::move(opened).error();
    if (stopped) co_return Error(Errc::connection, "the agent is stopping");
    DS_CO_TRY(may_attach(hello, peer.id()));  // another hello may have been admitted meanwhile

    const OpenSegment& segment = opened->segment;
    TrainerPtr trainer;
    if (const auto found = trainers.find(hello.writer_index); found != trainers.end()) trainer = found->second;
    if (!trainer || trainer->generation != segment.generation) {
      DS_CO_ASSIGN(TrainerPtr made, Trainer::make(strand, std::move(peer)));
      if (trainer) trainer->death.cancel();
      made->slot = hello.writer_index;
      made->generation = segment.generation;
      trainer = trainers[hello.writer_index] = std::move(made);
      spawn([self = shared_from_this(), trainer]() -> awaitable<void> { co_await self->watch_death(trainer); });
    }
    if (!board || board_generation != segment.generation) {
      board.emplace(make_board(opened->layout));
      board_generation = segment.generation;
    }
    trainer->writers = hello.writers;
    trainer->name = hello.name;
    trainer->connection = connection;
    publish();
    spdlog::info("trainer_attached slot={} writers={} pid={} name=\"{}\" generation={}", trainer->slot,
                 trainer->writers, trainer->watch.id().pid, trainer->name, trainer->generation);
    welcome = {segment.path.name, segment.path.dir.string(), segment.generation, segment.newest};
    co_return trainer;
  }

  // ---- requests -----------------------------------------------------------------------------------------------

  awaitable<Status> judge_plan(Trainer& trainer, ByteSpan payload) {
    DS_CO_ASSIGN(const wire::TrainerPlan plan, wire::TrainerPlan::decode(payload));
    if (!board || board_generation != trainer.generation) {
      co_return Error(Errc::layout_mismatch, "the layout was replaced: attach again");
    }
    const Deadline deadline = bounded(plan.deadline_ms, options.wait_limit);
    std::vector<TensorSlice> slices;
    slices.reserve(plan.rects.size());
    for (const auto& r : plan.rects) slices.push_back({r.tensor, Rect{r.row, r.col, r.rows, r.cols}});
    board->submit(trainer.slot, trainer.writers, std::move(slices));
    publish();
    wake_all();
    for (;;) {
      if (stopped) co_return Error(Errc::connection, "the agent is stopping");
      if (!board || board_generation != trainer.generation) {
        co_return Error(Errc::layout_mismatch, "the layout was replaced: attach again");
      }
      if (auto outcome = board->take_outcome(trainer.slot)) {
        publish();
        co_return std::move(*outcome);
      }
      if (deadline.passed()) {
        Error why = board->give_up(trainer.slot);
        publish();
        co_return why;
      }
      co_await change(deadline);
    }
  }

  awaitable<Result<wire::TrainerReady>> await_ready(ByteSpan payload) {
    DS_CO_ASSIGN(const wire::TrainerWait wait, wire::TrainerWait::decode(payload));
    const Deadline deadline = bounded(wait.deadline_ms, options.wait_limit);
    for (;;) {
      if (stopped) co_return Error(Errc::connection, "the agent is stopping");
      DS_CO_ASSIGN(const std::optional<wire::TrainerReady> ready, hooks.ready(wait.version));
      if (ready) co_return *ready;
      if (deadline.passed()) co_return Error(Errc::timed_out, to_string(wait.version) + " is not served yet");
      co_await change(deadline.earlier(Deadline::after(kPollInterval)));
    }
  }

  awaitable<Status> send_error(net::MessageStream& stream, std::uint64_t request, const Error& error) {
    // Named: g++ 12 destroys an aggregate temporary inside of a co_await expression twice.
    const wire::ErrorMessage message{error.code(), error.message()};
    co_return co_await stream.write(request, message, options.message_limit);
  }

  /// One request of an attached writer. False: the conversation is over.
  awaitable<Result<bool>> serve(net::MessageStream& stream, TrainerPtr trainer, const net::Message& message) {
    const auto limit = options.message_limit;
    const std::uint64_t request = message.header.request;
    switch (message.type()) {
      case wire::Type::trainer_notify: hooks.segment_changed(); co_return true;
      case wire::Type::trainer_plan: {
        const Status verdict = co_await judge_plan(*trainer, message.payload);
        if (verdict) {
          DS_CO_TRY(co_await stream.write(wire::Type::trainer_plan_ok, request, {}, limit));
        } else {
          DS_CO_TRY(co_await send_error(stream, request, verdict.error()));
        }
        co_return true;
      }
      case wire::Type::trainer_wait: {
        const auto ready = co_await await_ready(message.payload);
        if (ready) {
          DS_CO_TRY(co_await stream.write(request, *ready, limit));
        } else {
          DS_CO_TRY(co_await send_error(stream, request, ready.error()));
        }
        co_return true;
      }
      case wire::Type::end: {
        Error why(Errc::peer_died, trainer->who() + " said goodbye");
        co_await drop(trainer, std::move(why));
        DS_CO_TRY(co_await stream.write(wire::Type::end, request, {}, limit));
        co_return false;
      }
      default:
        co_return Error(Errc::protocol, "message type " + std::to_string(message.header.type) + " is no trainer's");
    }
  }

  /// hello, then requests until the end. `request` is what the error that ends the conversation answers, if it answers
  /// one: the refused hello.
  awaitable<Status> talk(net::MessageStream& stream, Result<ProcessWatch> peer, std::uint64_t connection,
                         std::uint64_t& request) {
    DS_CO_ASSIGN(
        const net::Message first,
        co_await stream.read(wire::kLayoutBytesMax, Deadline::after(options.hello_limit), options.message_limit));
    request = first.header.request;
    if (!peer) co_return std::move(peer).error();
    if (first.type() != wire::Type::trainer_hello) {
      co_return Error(Errc::protocol, "the first message must be trainer_hello");
    }
    DS_CO_TRY(wire::check_protocol(first.payload, "the trainer"));
    DS_CO_ASSIGN(const wire::TrainerHello hello, wire::TrainerHello::decode(first.payload));
    wire::TrainerWelcome welcome;
    DS_CO_ASSIGN(const TrainerPtr trainer, co_await admit(hello, std::move(*peer), connection, welcome));
    const auto sent = co_await stream.write(request, welcome, options.message_limit);
    request = 0;
    Status status = sent;
    while (status && !stopped) {
      auto message =
          co_await stream.read(wire::kRangesBytesMax, Deadline::after(options.idle_limit), options.message_limit);
      if (!message) {
        status = std::move(message).error();
        break;
      }
      auto more = co_await serve(stream, trainer, *message);
      if (!more) {
        status = std::move(more).error();
      } else if (!*more) {
        break;
      }
    }
    co_return status;
  }

  awaitable<void> converse(asio::generic::stream_protocol::socket socket) {
    Result<ProcessWatch> peer = watch_peer(socket.native_handle());
    net::MessageStream stream(std::move(socket));
    const std::uint64_t connection = next_connection++;
    connections.emplace(connection, stream.canceller());
    std::uint64_t request = 0;
    Status status;
    try {
      status = co_await talk(stream, std::move(peer), connection, request);
    } catch (const std::exception& e) {
      status = Error(Errc::internal, e.what());
    }
    for (const auto& [slot, trainer] : trainers) {
      // The slot stays with the process: a closed connection proves nothing.
      if (trainer->connection == connection) trainer->connection = 0;
    }
    publish();
    if (!stopped && !status && status.error().code() != Errc::connection) {
      spdlog::warn("trainer_refused error=\"{}\"", status.error().to_string());
      static_cast<void>(co_await send_error(stream, request, status.error()));
    }
    stream.close();
    connections.erase(connection);
  }

  awaitable<void> accept_all() {
    while (!stopped) {
      auto [ec, socket] = co_await acceptor.async_accept(kAsTuple);
      if (stopped) co_return;
      if (ec) {
        spdlog::warn("trainer_accept_failed error=\"{}\"", ec.message());
        co_await change(Deadline::after(kAcceptPause));
        continue;
      }
      if (connections.size() >= options.connections_max) {
        spdlog::warn("trainer_connections_full limit={}", options.connections_max);
        continue;
      }
      spawn([self = shared_from_this(),
             s = asio::generic::stream_protocol::socket(std::move(socket))]() mutable -> awaitable<void> {
        co_await self->converse(std::move(s));
      });
    }
  }

  /// The file, if it is still ours. Any thread.
  void remove_socket_file() const {
    struct stat now {};
    if (::lstat(options.socket_path.c_str(), &now) == 0 && std::pair(now.st_dev, now.st_ino) == socket_file) {
      ::unlink(options.socket_path.c_str());
    }
  }

  void stop_on_strand() {
    if (stopped.exchange(true)) return;
    boost::system::error_code ignored;
    acceptor.close(ignored);
    for (const auto& [id, canceller] : connections) canceller.cancel();
    for (const auto& [slot, trainer] : trainers) trainer->death.cancel();
    wake_all();
  }
};

TrainerServer::TrainerServer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

TrainerServer::~TrainerServer() {
  impl_->remove_socket_file();
  impl_->setup.join();
}

Result<std::unique_ptr<TrainerServer>> TrainerServer::listen(asio::io_context& io, TrainerHooks& hooks,
                                                             TrainerServerOptions options) {
  auto impl = std::make_shared<Impl>(io, hooks, std::move(options));
  DS_ASSIGN(UniqueFd fd, listen_unix(impl->options.socket_path));  // from here on there is a file to remove
  struct stat file {};
  if (::lstat(impl->options.socket_path.c_str(), &file) == 0) impl->socket_file = {file.st_dev, file.st_ino};
  boost::system::error_code ec;
  impl->acceptor.assign(asio::local::stream_protocol(), fd.get(), ec);
  if (ec) {
    impl->remove_socket_file();
    return Error(Errc::io, "listen on " + impl->options.socket_path + ": " + ec.message());
  }
  static_cast<void>(fd.release());  // the acceptor's now
  impl->spawn([impl]() -> awaitable<void> { co_await impl->accept_all(); });
  return std::unique_ptr<TrainerServer>(new TrainerServer(std::move(impl)));
}

void TrainerServer::version_served() {
  asio::post(impl_->strand, [impl = impl_] { impl->wake_all(); });
}

void TrainerServer::stop() {
  impl_->remove_socket_file();
  asio::post(impl_->strand, [impl = impl_] { impl->stop_on_strand(); });
}

std::vector<TrainerStatus> TrainerServer::status() const {
  const std::lock_guard lock(impl_->status_mutex);
  return impl_->published;
}

const std::string& TrainerServer::socket_path() const noexcept {
  return impl_->options.socket_path;
}

}  // namespace deltasync::agent
