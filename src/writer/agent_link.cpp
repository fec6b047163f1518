#include "writer/agent_link.hpp"

#include <algorithm>
#include <utility>

#include "base/call_context.hpp"
#include "format/handshake.hpp"
#include "net/peer_user.hpp"

namespace deltasync {
namespace {

constexpr auto kGoodbyeLimit = std::chrono::seconds(1);
constexpr auto kVerdictMargin = std::chrono::milliseconds(250);  // a busy machine answers late
constexpr auto kBackoffMin = std::chrono::milliseconds(5);
constexpr auto kBackoffMax = std::chrono::milliseconds(250);

/// What the agent is told: a little less than what is left, so that its verdict, which names what was missing,
/// arrives before this side gives up.
std::uint64_t to_ms(Deadline deadline) {
  const auto left = deadline.remaining_ms();
  return static_cast<std::uint64_t>((left - std::min(left / 4, kVerdictMargin)).count());
}

}  // namespace

AgentLink::AgentLink(std::string socket_path, const wire::TrainerHello& hello)
    : socket_path_(std::move(socket_path)), hello_(hello.encode()) {}

AgentLink::~AgentLink() {
  if (!fork_guard_.same_process()) return;
  const Deadline deadline = Deadline::after(kGoodbyeLimit);
  stop_on({});
  if (!connected() && !(cut_ && connect(deadline))) return;
  const std::uint64_t request = ++request_;
  if (!socket_.send(wire::Type::end, request, {}, deadline)) return;
  // Once the answer is here, the slot can be granted to the next process. Without it, the agent waits for our death.
  static_cast<void>(socket_.recv_answer(request, wire::Type::end, deadline));
}

void AgentLink::stop_on(const std::stop_token& stop) {
  cut_ |= stop_.stop_requested();
  stop_ = stop;
  socket_.stop_on(stop_);
}

Result<Attached> AgentLink::connect(Deadline deadline) {
  socket_.close();
  DS_ASSIGN(UniqueFd fd, net::connect_unix(socket_path_, {deadline, stop_}));
  // A stranger who made the socket first must not be told the layout, nor name the segment.
  DS_TRY(net::check_peer_user(fd.get(), "the agent on " + socket_path_, "this trainer"));
  socket_ = net::MessageSocket(std::move(fd));
  socket_.stop_on(stop_);
  const std::uint64_t request = ++request_;
  socket_.accept_files();
  auto attached = [&]() -> Result<Attached> {
    DS_TRY(socket_.send(wire::Type::trainer_hello, request, hello_, deadline));
    DS_ASSIGN(const net::Message message, socket_.recv_answer(request, wire::Type::trainer_welcome, deadline));
    DS_ASSIGN(auto welcome, wire::decode_handshake<wire::TrainerWelcome>(message.payload, "the agent"));
    return Attached{std::move(welcome), socket_.take_file()};
  }();
  if (attached) cut_ = false;
  if (!attached) socket_.close();
  if (attached && parents_) static_cast<void>(socket_.send(++request_, *parents_, deadline));
  if (attached) say_arrival(deadline);
  return attached;
}

Result<Attached> AgentLink::reconnect(Deadline deadline) {
  const CallContext until(deadline, stop_);
  std::chrono::nanoseconds pause = kBackoffMin;
  for (;;) {
    auto attached = connect(deadline);
    if (attached || attached.error().code() != Errc::connection) return attached;
    if (until.stop_requested()) return cancelled_while("waiting for the agent at " + socket_path_);
    if (deadline.passed()) return std::move(attached).with_context("no agent answered until the deadline");
    until.pause(pause);
    pause = std::min<std::chrono::nanoseconds>(pause * 2, kBackoffMax);
  }
}

void AgentLink::notify(const wire::TrainerNotify& offload, Deadline deadline) {
  if (connected()) static_cast<void>(socket_.send(++request_, offload, deadline));
}

void AgentLink::tell_parents(wire::TrainerParents parents, Deadline deadline) {
  parents_ = std::move(parents);
  if (connected()) static_cast<void>(socket_.send(++request_, *parents_, deadline));
}

void AgentLink::tell_arrival(const wire::TrainerArrival& arrival, UniqueFd memory, Deadline deadline) {
  arrival_ = arrival.encode();
  arrival_memory_ = std::move(memory);
  say_arrival(deadline);
}

void AgentLink::say_arrival(Deadline deadline) {
  if (!arrival_memory_ || !connected()) return;
  constexpr wire::Type kType = wire::TrainerArrival::kType;
  static_cast<void>(socket_.send_with_file(kType, ++request_, arrival_, arrival_memory_.get(), deadline));
}

void AgentLink::end_arrival(Deadline deadline) {
  forget_arrival();
  if (connected()) static_cast<void>(socket_.send(++request_, wire::TrainerArrival(), deadline));
}

Status AgentLink::restore_plan(std::span<const TensorSlice> plan, Deadline deadline) {
  return send_plan(plan, true, deadline);
}

Status AgentLink::register_plan(std::span<const TensorSlice> plan, Deadline deadline) {
  return send_plan(plan, false, deadline);
}

/// An agent bounds each wait: while the caller has more time than that, it is asked again.
template <class Message, class Receive>
auto AgentLink::ask(Message& message, Deadline deadline, Receive&& receive) -> decltype(receive(std::uint64_t{})) {
  for (;;) {
    message.deadline_ms = to_ms(deadline);
    const Deadline asked = Deadline::after(std::chrono::milliseconds(message.deadline_ms));
    const std::uint64_t request = ++request_;
    DS_TRY(socket_.send(request, message, deadline));
    auto answer = receive(request);
    if (answer || answer.error().code() != Errc::timed_out || asked.passed()) return answer;
  }
}

Status AgentLink::send_plan(std::span<const TensorSlice> plan, bool agreed, Deadline deadline) {
  wire::TrainerPlan message;
  message.agreed = agreed ? 1 : 0;
  message.rects.reserve(plan.size());
  for (const TensorSlice& s : plan) {
    message.rects.push_back({s.tensor, s.rect.row, s.rect.col, s.rect.rows, s.rect.cols});
  }
  return ask(message, deadline, [&](std::uint64_t request) -> Status {
    auto ok = socket_.recv_answer(request, wire::Type::trainer_plan_ok, deadline);
    if (!ok) return std::move(ok).error();
    return {};
  });
}

Result<wire::TrainerReady> AgentLink::wait_ready(const VersionId& version, Deadline deadline) {
  wire::TrainerWait message;
  message.version = version;
  return ask(message, deadline,
             [&](std::uint64_t request) { return socket_.recv_as<wire::TrainerReady>(request, deadline); });
}

}  // namespace deltasync
