#include "agent/serve/pull_conversation.hpp"

#include <boost/asio/post.hpp>

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/utf8.hpp"
#include "format/handshake.hpp"
#include "format/wire_report.hpp"
#include "format/wire_ucx.hpp"
#include "net/auth.hpp"
#include "net/coroutine.hpp"
#include "net/tls.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;
using net::kAsTuple;

namespace {

constexpr std::uint64_t kAuthBytesMax = 4096;         ///< before a peer has proved anything
constexpr std::uint64_t kRequestBytesMax = 4096;      ///< of one that has no ranges
constexpr auto kLastWords = std::chrono::seconds(1);  ///< to tell a peer why it is dropped, and again for it to read
constexpr std::uint64_t kSmallRequestBytes = 512;     ///< of one that is counted with its connection
constexpr std::uint64_t kHeldPerByte = 9;             ///< a range takes two bytes at least, and 16 once it is decoded
constexpr auto kRoomSlice = std::chrono::milliseconds(20);      ///< between looks whether there is memory
constexpr auto kVersionSlice = std::chrono::milliseconds(250);  ///< between looks at a waiting peer's socket
constexpr auto kAliveMin = std::chrono::milliseconds(20);       ///< between two words that an answer will come

const char* role_name(wire::Role role) {
  switch (role) {
    case wire::Role::control: return "control";
    case wire::Role::data: return "data";
    case wire::Role::watch: return "watch";
  }
  return "unknown";
}

/// More ranges than tiles are in none, and what they skip and cover are tiles as well, so that hardly any number in
/// them is longer than a byte.
std::uint64_t ranges_bytes_max(std::uint64_t tiles) {
  return std::max<std::uint64_t>(kRequestBytesMax, 64 + 2 * tiles + tiles / 128);
}

/// On the timeline.
const char* span_name(wire::Type request) {
  switch (request) {
    case wire::Type::get_layout: return "serve layout";
    case wire::Type::get_digests: return "serve digests";
    case wire::Type::get_extent: return "serve extent";
    case wire::Type::get_frames: return "serve frames";
    case wire::Type::get_raw_tiles: return "serve raw tiles";
    case wire::Type::subscribe: return "serve subscribe";
    case wire::Type::plan: return "serve plan";
    case wire::Type::release: return "serve release";
    case wire::Type::check_tiles: return "check tiles";
    case wire::Type::report: return "hear report";
    case wire::Type::end: return "hear goodbye";
    case wire::Type::get_lag: return "serve lag";
    case wire::Type::keep_alive: return "hear keep_alive";
    case wire::Type::relay_to: return "serve parents";
    case wire::Type::get_local: return "serve local";
    case wire::Type::open_ucx: return "open UCX";
    default: return "serve";
  }
}

}  // namespace

PullConversation::PullConversation(PullContext& context, net::MessageStream stream, std::uint64_t connection)
    : context_(context),
      core_(context.core),
      limits_(context.options.limits),
      connection_(connection),
      stream_(std::move(stream)),
      version_timer_(stream_.executor()),
      address_(stream_.peer_name()) {}

asio::awaitable<void> PullConversation::run() {
  Status status = co_await converse();
  core_.open_plans().connection_closed(connection_);
  log_end(status);
  if (!status) {
    // A peer that leaves between two messages is no error.
    if (status.error().code() != Errc::connection || mid_message_) core_.metrics().count_error(status.error().code());
    const Errc code = status.error().code();
    // Who leaves without a word, as a probe that only connects, has not tried.
    const bool tried = code != Errc::connection || stream_.heard();
    if (!authenticated_ && tried) Metrics::add(core_.metrics().handshakes_failed, 1);
    const bool listens = turned_away_ || (code != Errc::connection && code != Errc::aborted);
    if (!mid_message_ && listens) {
      // The peer may be gone, or be no deltasync at all: this is a courtesy.
      wire::ErrorMessage words;
      words.code = code;
      words.message = status.error().message();
      static_cast<void>(co_await stream_.write(0, words, kLastWords));
    }
    if ((turned_away_ || code != Errc::connection) && !context_.stopping) co_await stream_.finish(kLastWords);
  }
  stream_.close();
}

void PullConversation::log_end(const Status& status) const {
  if (turned_away_) {
    log::warn(context_.refusal_lines, "peer_refused peer={} name=\"{}\" reason=\"{}\"", address_, name_,
              status.error().message());
    return;
  }
  if (status || status.error().code() == Errc::connection || context_.stopping) {
    log::debug("peer_left connection={} peer={} name=\"{}\"", connection_, address_, name_);
    return;
  }
  log::warn(authenticated_ ? context_.peer_lines : context_.stranger_lines,
            "peer_dropped connection={} peer={} name=\"{}\" error=\"{}\"", connection_, address_, name_,
            status.error().to_string());
}

asio::awaitable<Status> PullConversation::converse() {
  if (Status shaken = co_await handshake(); !shaken) {
    if (turned_away_) co_return shaken;  // its words are meant for the peer
    co_return std::move(shaken).with_context("handshake");
  }
  context_.note(connection_, [this](PeerStatus& line) {
    line.name = name_;
    line.role = role_name(role_);
  });
  track_ = trace::add_track(name_ + " #" + std::to_string(connection_) + " " + role_name(role_));
  log::debug("peer_connected connection={} peer={} name=\"{}\" role={}", connection_, address_, name_,
             role_name(role_));
  if (role_ == wire::Role::watch) co_return co_await serve_watch();
  co_return co_await serve_requests();
}

asio::awaitable<Status> PullConversation::handshake() {
  const Deadline deadline = Deadline::after(limits_.handshake);
  if (const auto& tls = context_.options.tls) {
    DS_CO_ASSIGN(auto channel, tls->channel(stream_.fd(), address_, [own = stream_.canceller()] { own.close(); }));
    DS_CO_TRY(co_await stream_.secure(std::move(channel), deadline));
  }
  const std::string& token = context_.options.token;
  wire::Hello hello;
  hello.auth_required = token.empty() ? 0 : 1;
  hello.instance = context_.options.instance;
  hello.nonce = net::make_nonce();
  DS_CO_TRY(co_await stream_.write(wire::kHelloRequest, hello, deadline.remaining()));

  DS_CO_ASSIGN(const Request message, co_await stream_.read_by(kAuthBytesMax, deadline));
  if (message.type() != wire::Type::auth) co_return Error(Errc::protocol, "the first message is no auth");
  DS_CO_ASSIGN(protocol_, wire::check_protocol(message.payload, "the peer"));
  DS_CO_ASSIGN(wire::Auth auth, wire::decode_handshake<wire::Auth>(message.payload, "the peer"));
  name_ = printable(auth.name);
  role_ = auth.role;
  if (!token.empty() && !net::equal_proofs(auth.proof, net::client_proof(token, hello.nonce, auth.nonce, auth.role))) {
    co_return Error(Errc::unauthenticated, "no token or a wrong one: agent and receiver need the same");
  }
  authenticated_ = true;
  const Status settled = context_.settle(connection_, role_);
  if (!settled) {
    turned_away_ = settled.error().code() == Errc::connection;
    co_return settled;
  }
  wire::Welcome welcome;
  welcome.proof = net::server_proof(token, auth.nonce, hello.nonce);
  const SnapshotPtr now = core_.versions().snapshot();
  welcome.has_layout = now->offer.has_layout ? 1 : 0;
  welcome.layout = now->offer.layout;
  welcome.clock = trace::clock_id();
  welcome.clock_ns = trace::now_ns();
  co_return co_await stream_.write(message.header.request, welcome, deadline.remaining());
}

asio::awaitable<Status> PullConversation::serve_requests() {
  const bool data = role_ == wire::Role::data;
  while (!context_.stopping) {
    wire::MessageParser coming;
    const Deadline idle = Deadline::after(data ? limits_.data_idle : limits_.idle);
    DS_CO_ASSIGN(const auto deadline, co_await stream_.read_header(coming, idle, limits_.message));
    if (!deadline && data) co_return Status();  // the receiver opens another one when it pulls again
    if (!deadline) co_return Error(Errc::timed_out, "nothing was asked for a long time");
    if (!data) context_.children.heard(connection_);
    answering_ = coming.header().request;
    alive_at_ = std::chrono::steady_clock::now() + alive_every_;
    const std::uint64_t bytes_max = request_bytes_max(static_cast<wire::Type>(coming.header().type));
    Room::Share held;  // until the request is answered
    if (const std::uint64_t bytes = std::min(coming.header().payload_bytes, bytes_max); bytes > kSmallRequestBytes) {
      DS_CO_ASSIGN(held, co_await hold_request(kHeldPerByte * bytes));
    }
    DS_CO_ASSIGN(Request request, co_await stream_.read_payload(coming, bytes_max, *deadline));
    DS_CO_TRY(co_await dispatch(request));
    const std::uint64_t sent = stream_.bytes_sent();
    context_.note(connection_, [sent](PeerStatus& line) { line.bytes_sent = sent; });
  }
  co_return Error(Errc::connection, "the agent is shutting down");
}

std::uint64_t PullConversation::request_bytes_max(wire::Type type) const {
  switch (type) {
    case wire::Type::get_frames:
    case wire::Type::get_raw_tiles:
    case wire::Type::check_tiles:
    case wire::Type::subscribe: return std::min(wire::kRangesBytesMax, ranges_bytes_max(core_.versions().tiles_max()));
    case wire::Type::open_ucx: return kRequestBytesMax + wire::kUcxAddressBytesMax;
    default: return kRequestBytesMax;
  }
}

Error PullConversation::no_memory() const {
  Metrics::add(core_.metrics().memory_refused, 1);
  return {Errc::timed_out, "busy: peers have taken the " + std::to_string(core_.peer_room().bytes_max()) +
                               " bytes that the agent holds for them (--peer-memory-mib); try again, or another agent"};
}

asio::awaitable<Result<Room::Share>> PullConversation::hold_request(std::uint64_t bytes) {
  return wait_for_room(&Room::take_first, bytes, nullptr);
}

asio::awaitable<Result<Room::Share>> PullConversation::hold(std::uint64_t bytes,
                                                            const net::MessageStream::MaySend* permit) {
  return wait_for_room(&Room::take, bytes, permit);
}

asio::awaitable<Result<Room::Share>> PullConversation::wait_for_room(Take take, std::uint64_t bytes,
                                                                     const net::MessageStream::MaySend* permit) {
  const Room& room = core_.peer_room();
  const std::uint64_t wanted = std::min(bytes, room.waited_bytes_max());
  const Deadline deadline = Deadline::after(limits_.room);
  for (;;) {
    if (auto share = (room.*take)(wanted)) co_return *std::move(share);
    if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
    if (deadline.passed()) co_return no_memory();
    DS_CO_TRY(co_await wait_for_version(deadline.earlier(Deadline::after(kRoomSlice))));
    if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while it waited for memory");
    if (permit != nullptr && !permit->may_send()) {
      co_return Error(Errc::lease_revoked, "the plan ended while its answer waited for memory; plan again");
    }
  }
}

asio::awaitable<Status> PullConversation::dispatch(Request& request) {
  trace::TrackSpan span(track_, span_name(request.type()), {});
  const std::uint64_t before = stream_.bytes_sent();
  asked_ = {};
  Status status = co_await answer(request);
  span.set_version(asked_);
  span.set({"bytes", stream_.bytes_sent() - before});
  co_return status;
}

asio::awaitable<Status> PullConversation::answer(Request& request) {
  switch (request.type()) {
    case wire::Type::get_layout: co_return co_await on_get_layout(request);
    case wire::Type::get_digests: co_return co_await on_get_digests(request);
    case wire::Type::get_extent: co_return co_await on_get_extent(request);
    case wire::Type::get_frames: co_return co_await on_get_frames(request);
    case wire::Type::get_raw_tiles: co_return co_await on_get_raw_tiles(request);
    case wire::Type::plan:
      if (role_ == wire::Role::control) co_return co_await on_plan(request);
      break;
    case wire::Type::subscribe:
      if (role_ == wire::Role::control) co_return co_await on_subscribe(request);
      break;
    case wire::Type::release:
      if (role_ == wire::Role::control) co_return co_await on_release(request);
      break;
    case wire::Type::check_tiles:
      if (role_ == wire::Role::control && protocol_ >= 5) co_return co_await on_check_tiles(request);
      break;
    case wire::Type::report:
      if (role_ == wire::Role::control && protocol_ >= 5) co_return on_report(request);
      break;
    case wire::Type::end:
      if (role_ == wire::Role::control && protocol_ >= 5) co_return on_goodbye(request);
      break;
    case wire::Type::get_lag:
      if (role_ == wire::Role::control && protocol_ >= 5) co_return co_await on_get_lag(request);
      break;
    case wire::Type::relay_to:
      if (role_ == wire::Role::control && protocol_ >= 5) co_return co_await on_relay_to(request);
      break;
    case wire::Type::get_local:
      if (role_ == wire::Role::control && protocol_ >= 5) co_return co_await on_get_local(request);
      break;
    case wire::Type::keep_alive:
      if (role_ != wire::Role::watch && protocol_ >= 5) co_return on_keep_alive(request);
      break;
    case wire::Type::open_ucx:
      if (role_ == wire::Role::data && protocol_ >= 5) co_return co_await on_open_ucx(request);
      break;
    default: break;
  }
  co_return Error(Errc::protocol,
                  wire::describe(request.header) + " is no request of a " + role_name(role_) + " conversation");
}

asio::awaitable<Status> PullConversation::refuse(Request& request, Error error) {
  core_.metrics().count_error(error.code());
  log::debug("request_refused connection={} name=\"{}\" type={} error=\"{}\"", connection_, name_, request.header.type,
             error.to_string());
  std::vector<std::byte>().swap(request.payload);
  wire::ErrorMessage answer;
  answer.code = error.code();
  answer.message = error.message();
  co_return co_await stream_.write(request.header.request, answer, limits_.progress);
}

asio::awaitable<Status> PullConversation::conclude(Request& request, const Status& sent) {
  if (sent) co_return co_await send_end(request);
  if (mid_message_ || sent.error().code() == Errc::connection) co_return sent;
  co_return co_await refuse(request, sent.error());
}

asio::awaitable<Status> PullConversation::on_get_layout(Request& request) {
  DS_CO_TRY(wire::Empty::decode(request.payload).with_context("get_layout"));
  std::shared_ptr<const std::vector<std::byte>> payload;
  if (const SnapshotPtr now = core_.versions().snapshot(); now->generation) payload = now->generation->layout_payload;
  if (!payload) co_return co_await refuse(request, Error(Errc::not_found, "no trainer has brought a layout yet"));
  DS_CO_TRY(co_await stream_.write(wire::Type::layout, request.header.request, *payload, limits_.progress));
  Metrics::add(core_.metrics().bytes_layout, payload->size());
  co_return Status();
}

/// A publication between a look at the state and the wait cannot be missed: it posts to this strand.
Changes::Listener PullConversation::hear(Changes& changes) {
  return changes.listen(
      [timer = &version_timer_, executor = stream_.executor(), alive = std::weak_ptr<const bool>(alive_)] {
        asio::post(executor, [timer, alive] {
          if (!alive.expired()) timer->cancel();
        });
      });
}

asio::awaitable<Status> PullConversation::wait_for_version(Deadline deadline) {
  Deadline slice = deadline.earlier(Deadline::after(kVersionSlice));
  if (alive_every_.count() != 0) slice = slice.earlier(Deadline(alive_at_));
  version_timer_.expires_at(slice.at());
  co_await version_timer_.async_wait(kAsTuple);
  if (alive_every_.count() == 0 || !Deadline(alive_at_).passed()) co_return Status();
  Status said = co_await stream_.write(wire::Type::alive, answering_, {}, limits_.progress);
  mid_message_ = !said && said.error().code() != Errc::connection;
  alive_at_ = std::chrono::steady_clock::now() + alive_every_;
  co_return said;
}

Status PullConversation::on_keep_alive(const Request& request) {
  DS_ASSIGN(const wire::KeepAlive asked, wire::KeepAlive::decode(request.payload));
  alive_every_ = std::max<std::chrono::milliseconds>(kAliveMin, std::chrono::milliseconds(asked.every_ms));
  return {};
}

Status PullConversation::on_report(const Request& request) {
  DS_ASSIGN(wire::Report report, wire::Report::decode(request.payload));
  asked_ = report.committed.id;
  // One a connection, so that the connections bound the table.
  if (reporter_.value_or(report.receiver) != report.receiver) {
    return Error(Errc::protocol, "reports of two receivers over one connection");
  }
  reporter_ = report.receiver;
  context_.children.is(connection_, report.receiver);
  context_.children.stands(connection_, report.committed.id.valid() && report.error.empty());
  context_.receivers.report({connection_, name_, address_}, report.receiver, std::move(report.committed),
                            printable(std::move(report.error)));
  return {};
}

Status PullConversation::on_goodbye(const Request& request) {
  DS_TRY(wire::Empty::decode(request.payload).with_context("end"));
  context_.receivers.goodbye(connection_);
  return Error(Errc::connection, "the receiver has said goodbye");
}

asio::awaitable<Status> PullConversation::on_get_lag(Request& request) {
  DS_CO_ASSIGN(const wire::GetLag question, wire::GetLag::decode(request.payload));
  wire::Lag answer;
  answer.cut_off_ns = core_.origin().cut_off_ns();
  if (const ServedPtr served = core_.versions().snapshot()->served) {
    const Behind behind = core_.versions().behind(question.held);
    answer.newest = served->version;
    answer.versions = behind.versions;
    answer.behind_ns = static_cast<std::uint64_t>(behind.since.count());
    const std::chrono::nanoseconds age = std::chrono::steady_clock::now() - served->published_at;
    answer.newest_age_ns = static_cast<std::uint64_t>(age.count());
  }
  co_return co_await stream_.write(request.header.request, answer, limits_.progress);
}

asio::awaitable<Status> PullConversation::on_relay_to(Request& request) {
  DS_CO_ASSIGN(wire::RelayTo relay, wire::RelayTo::decode(request.payload));
  wire::Parents answer{core_.origin().parents(), core_.origin().cut_off_ns()};
  std::vector<wire::Parent> from_here = answer.list;
  from_here.insert(from_here.begin(), {context_.options.instance, "this one"});
  std::string cycle = wire::cycle_of(from_here, relay.instance);
  if (!cycle.empty()) co_return co_await refuse(request, Error(Errc::invalid_argument, std::move(cycle)));
  context_.children.relays(connection_, relay.instance, printable(relay.endpoint));
  co_return co_await stream_.write(request.header.request, answer, limits_.progress);
}

asio::awaitable<Status> PullConversation::send_end(const Request& request) {
  return stream_.write(wire::Type::end, request.header.request, {}, limits_.progress);
}

asio::awaitable<Status> PullConversation::serve_watch() {
  DS_CO_ASSIGN(const Request request,
               co_await stream_.read(wire::kControlBytesMax, Deadline::after(limits_.handshake), limits_.handshake));
  if (request.type() != wire::Type::watch) co_return Error(Errc::protocol, "the first request is no watch");
  DS_CO_TRY(wire::Empty::decode(request.payload).with_context("watch"));
  const auto subscription = hear_versions();
  HalfKey told;  // a slow peer skips what was published while it read
  while (!context_.stopping) {
    if (const auto ready = news(told)) {
      DS_CO_TRY(co_await stream_.write(request.header.request, *ready, limits_.progress));
      continue;
    }
    DS_CO_TRY(co_await wait_for_version(Deadline::after(kVersionSlice)));
    if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer closed the connection");
    if (stream_.has_input() && !stream_.peer_closed()) {
      co_return Error(Errc::protocol, "a watch conversation has one request");
    }
  }
  co_return Error(Errc::connection, "the agent is shutting down");
}

/// Holds nothing of what is served once it returns: a watcher must not pin a half that is to be released.
std::optional<wire::VersionReady> PullConversation::news(HalfKey& told) const {
  const ServedPtr served = core_.versions().snapshot()->served;
  if (!served || served->half == told) return std::nullopt;
  told = served->half;
  wire::VersionReady ready;
  ready.version = served->version;
  ready.layout = served->generation->layout->digest();
  return ready;
}

}  // namespace deltasync::agent
