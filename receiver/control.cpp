#include "receiver/control.hpp"

#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "delta/delta.hpp"

namespace deltasync::receiver {
namespace {

constexpr auto kTellLimit = std::chrono::milliseconds(200);  ///< to hand a few hundred bytes to the system
constexpr auto kGoodbyeLimit = std::chrono::seconds(1);

struct GetLayout {
  static constexpr wire::Type kType = wire::Type::get_layout;
  std::vector<std::byte> encode() const { return {}; }
};

}  // namespace

void Control::drop() {
  cut_ |= told_;
  closed_bytes_ += connection_.bytes_received();
  connection_ = Connection();
  subscription_ = {};
  told_ = false;
  parents_asked_at_ = {};
}

/// Its agent need not wonder what became of this receiver.
void Control::leave() {
  if (told_ && connection_.open() && !connection_.stale()) {
    told_ = !connection_.send(wire::Type::end, connection_.next_request(), Deadline::after(kTellLimit)).ok();
  }
  drop();
}

/// A connection that a stop has shut down is of no more use.
void Control::stop_on(const std::stop_token& stop) {
  connection_.stop_on({});
  if (stop_.stop_requested()) drop();
  stop_ = stop;
  connection_.stop_on(stop_);
}

Status Control::connect_once(Connection& connection, std::chrono::milliseconds patience, Deadline deadline) {
  const Deadline limit = deadline.earlier(Deadline::after(patience));
  clock_seen_ns_ = trace::now_ns();
  turned_away_ = false;
  DS_ASSIGN(connection, Connection::dial(peer_, {limit, stop_}));
  Status shaken = connection.handshake(peer_, wire::Role::control, limit);
  turned_away_ = connection.turned_away();
  return std::move(shaken).with_context("handshake");
}

Status Control::connect(Deadline deadline) {
  return connect(peer_.tuning.handshake, deadline);
}

Status Control::connect(std::chrono::milliseconds patience, Deadline deadline) {
  drop();
  auto status = connect_once(connection_, patience, deadline);
  if (status) {
    tell_standing();
    return status;
  }
  drop();
  noted_ = status.error();
  return std::move(status).with_context("agent at " + peer_.endpoint());
}

void Control::lost(const Error& why) {
  drop();
  noted_ = why;
  if (why.code() == Errc::timed_out && (!peer_.pulse || peer_.pulse->is_gone())) note_silent();
}

template <class T>
Answer<T> Control::give_up(const Error& error) {
  lost(error);
  Answer<T> answer;
  answer.broken = error;
  return answer;
}

template <class T>
std::optional<wire::Header> Control::answer_header(Answer<T>& answer, wire::Type type, std::uint64_t request,
                                                   Deadline header_deadline, Deadline deadline) {
  auto header = connection_.recv_header(header_deadline);
  if (!header) {
    answer = give_up<T>(std::move(header).error());
    return std::nullopt;
  }
  heard_at_ = Clock::now();
  if (header->type == static_cast<std::uint16_t>(wire::Type::error)) {
    auto payload = connection_.recv_payload(*header, deadline);
    if (!payload) {
      answer = give_up<T>(std::move(payload).error());
    } else {
      answer.refused = agent_error(*payload);
    }
    return std::nullopt;
  }
  const bool no_place = header->type == static_cast<std::uint16_t>(wire::Type::elsewhere);
  if (no_place && type == wire::Type::plan_reply && header->request == request) {
    auto payload = connection_.recv_payload(*header, deadline);
    auto named = payload ? wire::Elsewhere::decode(*payload) : Result<wire::Elsewhere>(std::move(payload).error());
    if (!named) {
      answer = give_up<T>(std::move(named).error());
    } else {
      answer.elsewhere = std::move(*named);
    }
    return std::nullopt;
  }
  if (header->type != static_cast<std::uint16_t>(type) || header->request != request) {
    answer = give_up<T>(unexpected(*header, request));
    return std::nullopt;
  }
  return *header;
}

template <class M, class Question>
Answer<M> Control::ask(const Question& question, std::chrono::milliseconds patience, Deadline deadline) {
  const std::uint64_t request = connection_.next_request();
  const Deadline send_limit = deadline.earlier(Deadline::after(peer_.tuning.silence));
  if (auto sent = connection_.send(request, question, send_limit); !sent) return give_up<M>(std::move(sent).error());
  Answer<M> answer;
  const Deadline header_limit = deadline.earlier(Deadline::after(patience + peer_.tuning.silence));
  const auto header = answer_header(answer, M::kType, request, header_limit, deadline);
  if (!header) return answer;
  auto payload = connection_.recv_payload(*header, deadline);
  if (!payload) return give_up<M>(std::move(payload).error());
  auto message = M::decode(*payload);
  if (!message) return give_up<M>(std::move(message).error());
  answer.value = std::move(*message);
  return answer;
}

Answer<wire::LayoutMessage> Control::layout(Deadline deadline) {
  return ask<wire::LayoutMessage>(GetLayout(), std::chrono::milliseconds(0), deadline);
}

Answer<wire::Empty> Control::subscribe(const wire::Subscribe& tiles, const Digest128& digest, Deadline deadline) {
  subscription_ = {};
  auto answer = ask<wire::Empty>(tiles, std::chrono::milliseconds(0), deadline);
  if (answer.value) subscription_ = digest;
  return answer;
}

Answer<wire::PlanReply> Control::plan(const wire::PlanRequest& plan, Deadline deadline) {
  auto answer = ask<wire::PlanReply>(plan, std::chrono::milliseconds(plan.wait_ms), deadline);
  if (peer_.pulse && !answer.broken) peer_.pulse->be_quick();
  return answer;
}

Answer<std::vector<std::uint64_t>> Control::digests(std::uint64_t plan, std::uint64_t tiles, const Digest128& root,
                                                    Deadline deadline) {
  using Digests = std::vector<std::uint64_t>;
  const std::uint64_t request = connection_.next_request();
  const Deadline limit = deadline.earlier(Deadline::after(peer_.tuning.silence));
  if (auto sent = connection_.send(request, wire::GetDigests{plan}, limit); !sent) {
    return give_up<Digests>(std::move(sent).error());
  }
  Answer<Digests> answer;
  const auto header = answer_header(answer, wire::Type::digests, request, limit, deadline);
  if (!header) return answer;
  if (header->payload_bytes != tiles * sizeof(std::uint64_t)) {
    return give_up<Digests>(Error(Errc::protocol, "a digest table of " + std::to_string(header->payload_bytes) +
                                                      " bytes for " + std::to_string(tiles) + " tiles"));
  }
  Digests digests(static_cast<std::size_t>(tiles));
  const MutByteSpan bytes(reinterpret_cast<std::byte*>(digests.data()), digests.size() * sizeof(std::uint64_t));
  if (auto received = connection_.recv_payload(*header, bytes, deadline); !received) {
    return give_up<Digests>(std::move(received).error());
  }
  if (delta::root_digest(digests) != root) {
    return give_up<Digests>(Error(Errc::corrupt, "the digest table does not have the root that the plan named"));
  }
  answer.value = std::move(digests);
  return answer;
}

Answer<wire::TilesChecked> Control::check_tiles(const wire::CheckTiles& question, Deadline deadline) {
  return ask<wire::TilesChecked>(question, std::chrono::milliseconds(0), deadline);
}

Answer<wire::Parents> Control::parents(const wire::RelayTo& own, Deadline deadline) {
  auto answer = ask<wire::Parents>(own, std::chrono::milliseconds(0), deadline);
  if (answer.value) parents_asked_at_ = Clock::now();
  return answer;
}

Answer<wire::Local> Control::local(std::uint64_t plan, Deadline deadline) {
  return ask<wire::Local>(wire::GetLocal{plan}, std::chrono::milliseconds(0), deadline);
}

void Control::report(wire::Report standing) {
  if (told_ && standing == standing_) return;
  standing_ = std::move(standing);
  told_ = false;
  tell_standing();
}

/// There is no answer: a commit, while an engine stands still, waits for nobody.
void Control::tell_standing() {
  if (told_ || !connection_.open() || connection_.stale() || connection_.protocol() < 5) return;
  told_ = connection_.send(connection_.next_request(), standing_, Deadline::after(kTellLimit)).ok();
  if (!told_) drop();  // part of it may be out
  if (told_) cut_ = false;
}

void Control::say_goodbye() {
  if (!fork_guard_.same_process()) return;
  if (!connection_.open() && cut_) static_cast<void>(connect(Deadline::after(kGoodbyeLimit)));
  leave();
}

void Control::release(std::uint64_t plan, Deadline deadline) {
  if (!connection_.open() || plan == 0) return;
  const Deadline limit = deadline.earlier(Deadline::after(peer_.tuning.release));
  const std::uint64_t request = connection_.next_request();
  if (auto sent = connection_.send(request, wire::Release{plan}, limit); !sent) return drop();
  Answer<wire::Empty> answer;
  const auto header = answer_header(answer, wire::Type::end, request, limit, limit);
  if (header && header->payload_bytes != 0) drop();
}

}  // namespace deltasync::receiver
