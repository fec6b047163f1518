#include "tests/receiver/fake_agent.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "base/trace.hpp"
#include "net/auth.hpp"

namespace deltasync::test {
namespace {

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "fake agent: %s\n", what);
  std::abort();
}

}  // namespace

FakeAgent::FakeAgent(LayoutPtr layout, Setup setup) : layout_(std::move(layout)), setup_(std::move(setup)) {
  epoch_ = setup_.epoch != 0 ? setup_.epoch : make_epoch();
  listener_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(setup_.port);
  socklen_t size = sizeof address;
  const int on = 1;
  if (::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_.get(), 64) != 0 ||
      ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    give_up("cannot listen");
  }
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { accept_loop(); });
}

FakeAgent::~FakeAgent() {
  stop_ = true;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& entry : open_fds_) ::shutdown(entry.second, SHUT_RDWR);
  }
  acceptor_.join();
  for (auto& t : threads_) t.join();
}

std::string FakeAgent::endpoint() const {
  return "127.0.0.1:" + std::to_string(port_);
}

VersionId FakeAgent::publish(std::vector<std::byte> half, const std::string& label) {
  const std::lock_guard lock(mutex_);
  State next;
  next.version = {{epoch_, versions_.empty() ? 1 : versions_.back().version.id.number + 1}, label};
  auto digests = std::make_shared<std::vector<std::uint64_t>>(layout_->tile_count());
  if (versions_.empty()) {
    delta::half_digests(*layout_, half, *digests, pool_);
  } else {
    const State& last = versions_.back();
    *digests = *last.digests;
    auto d = std::make_shared<delta::Delta>(
        delta::encode(*layout_, *last.half, half, *digests,
                      {last.version.id, next.version.id, last.root, delta::ValueForm::ulp}, pool_));
    ring_.push_back(std::move(d));
    while (ring_.size() > setup_.ring_deltas) ring_.pop_front();
    if (std::exchange(new_generation_, false)) ring_.clear();
  }
  next.root = delta::root_digest(*digests);
  next.digests = std::move(digests);
  next.half = std::make_shared<std::vector<std::byte>>(std::move(half));
  versions_.push_back(std::move(next));
  return versions_.back().version.id;
}

std::vector<std::byte> FakeAgent::newest() const {
  const std::lock_guard lock(mutex_);
  return *versions_.back().half;
}

Version FakeAgent::newest_version() const {
  const std::lock_guard lock(mutex_);
  return versions_.back().version;
}

std::vector<std::byte> FakeAgent::half_of(const VersionId& id) const {
  const std::lock_guard lock(mutex_);
  for (const State& v : versions_) {
    if (v.version.id == id) return *v.half;
  }
  return {};
}

void FakeAgent::restart() {
  const std::lock_guard lock(mutex_);
  ++instance_;
  plans_.clear();
  ring_.clear();
  for (const auto& entry : open_fds_) ::shutdown(entry.second, SHUT_RDWR);
}

void FakeAgent::new_trainer() {
  const std::lock_guard lock(mutex_);
  epoch_ = make_epoch(epoch_);
  versions_.clear();
  ring_.clear();
  plans_.clear();
}

void FakeAgent::change_layout(LayoutPtr layout) {
  const std::lock_guard lock(mutex_);
  layout_ = std::move(layout);
  versions_.clear();
  ring_.clear();
  plans_.clear();
}

void FakeAgent::change_sidecar(Sidecar sidecar) {
  const std::lock_guard lock(mutex_);
  sidecar_ = std::move(sidecar);
  new_generation_ = true;
  ring_.clear();
  plans_.clear();
}

void FakeAgent::on_request(std::function<Fault(const Request&)> hook) {
  const std::lock_guard lock(hook_mutex_);
  hook_ = std::move(hook);
}

void FakeAgent::revoke_after(std::uint64_t bytes, std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  revoke_after_ = bytes;
  on_revoke_ = std::move(hook);
}

std::uint64_t FakeAgent::requests(wire::Type type) const {
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(static_cast<std::uint16_t>(type));
  return it == requests_.end() ? 0 : it->second;
}

std::uint64_t FakeAgent::live_plans() const {
  const std::lock_guard lock(mutex_);
  return plans_.size();
}

std::vector<wire::TileRange> FakeAgent::extents_asked() const {
  const std::lock_guard lock(mutex_);
  return extents_asked_;
}

std::vector<wire::PlanRequest> FakeAgent::plans() const {
  const std::lock_guard lock(mutex_);
  return plans_seen_;
}

// ---- connections ---------------------------------------------------------------------------------------------

void FakeAgent::accept_loop() {
  while (!stop_) {
    pollfd p{listener_.get(), POLLIN, 0};
    if (::poll(&p, 1, 20) <= 0) continue;
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) continue;
    const std::uint64_t id = ++connections_;
    const std::lock_guard lock(mutex_);
    threads_.emplace_back([this, id, raw = fd.release()] { serve(UniqueFd(raw), id); });
  }
}

void FakeAgent::serve(UniqueFd fd, std::uint64_t id) {
  Peer peer;
  {
    const std::lock_guard lock(mutex_);
    open_fds_[id] = fd.get();
  }
  peer.socket = net::MessageSocket(UniqueFd(::dup(fd.get())));
  peer.id = id;
  Status status = handshake(peer);
  while (status && !stop_) {
    auto message = peer.socket.recv(wire::kRangesBytesMax, soon());
    if (!message) break;
    status = answer(peer, *message);
    if (status && !has_no_answer(message->type())) ++answers_;
  }
  const std::lock_guard lock(mutex_);
  ::shutdown(fd.get(), SHUT_RDWR);
  open_fds_.erase(id);
  for (auto it = plans_.begin(); it != plans_.end();) {
    it = it->second->owner == id ? plans_.erase(it) : std::next(it);
  }
}

Status FakeAgent::handshake(Peer& peer) {
  wire::Hello hello;
  hello.protocol = setup_.protocols.oldest;
  hello.auth_required = setup_.token.empty() ? 0 : 1;
  hello.nonce = net::make_nonce();
  switch (ask_hook({wire::Type::hello, 0, {}})) {
    case Fault::none: break;
    case Fault::drop_midway: return hang_up(peer);
    case Fault::stall: std::this_thread::sleep_for(std::chrono::milliseconds(300)); return Error(Errc::aborted, "");
    case Fault::garbage:
      return send_bytes(peer, bytes_of(std::string_view("HTTP/1.1 400 Bad Request\r\n\r\n"
                                                        "and some more to fill a header")));
    default: return Error(Errc::aborted, "");
  }
  wire::Welcome welcome;
  if (setup_.same_host) {
    welcome.clock = trace::clock_id();
  } else {
    welcome.clock.bytes.fill(0xFA);
  }
  welcome.clock_ns = kClockNs;
  {
    const std::lock_guard lock(mutex_);
    hello.instance = instance_;
    welcome.has_layout = layout_ ? 1 : 0;
    if (layout_) welcome.layout = layout_->digest();
  }
  DS_TRY(peer.socket.send(setup_.protocols.newest, hello, soon()));
  DS_ASSIGN(const wire::Auth auth, peer.socket.recv_as<wire::Auth>(0, soon()));
  peer.role = auth.role;
  {
    const std::lock_guard lock(mutex_);
    protocols_spoken_.insert(auth.protocol);
  }
  if (!net::equal_proofs(auth.proof, net::client_proof(setup_.token, hello.nonce, auth.nonce, auth.role))) {
    return send_error(peer, 0, Errc::unauthenticated, "wrong token");
  }
  if (setup_.proves_token) welcome.proof = net::server_proof(setup_.token, auth.nonce, hello.nonce);
  return peer.socket.send(0, welcome, soon());
}

std::set<std::uint16_t> FakeAgent::protocols_spoken() const {
  const std::lock_guard lock(mutex_);
  return protocols_spoken_;
}

Fault FakeAgent::ask_hook(const Request& request) {
  Request r = request;
  {
    const std::lock_guard lock(mutex_);
    r.ordinal = requests_[static_cast<std::uint16_t>(r.type)]++;
  }
  const std::lock_guard lock(hook_mutex_);
  return hook_ ? hook_(r) : Fault::none;
}

void FakeAgent::throttle(std::size_t bytes) {
  if (setup_.bytes_per_s == 0) return;
  std::chrono::steady_clock::time_point until;
  {
    const std::lock_guard lock(throttle_);
    if (throttled_bytes_ >= setup_.slow_bytes) return;
    throttled_bytes_ += bytes;
    const std::chrono::duration<double> time(static_cast<double>(bytes) / setup_.bytes_per_s);
    link_free_at_ = std::max(link_free_at_, std::chrono::steady_clock::now()) +
                    std::chrono::duration_cast<std::chrono::nanoseconds>(time);
    until = link_free_at_;
  }
  std::this_thread::sleep_until(until);
}

Status FakeAgent::send_bytes(Peer& peer, ByteSpan bytes) {
  constexpr std::size_t kThrottledBytes = 16u << 10;
  while (!bytes.empty()) {
    const std::size_t some = setup_.bytes_per_s == 0 ? bytes.size() : std::min(bytes.size(), kThrottledBytes);
    const ssize_t n = ::send(peer.socket.fd(), bytes.data(), some, MSG_NOSIGNAL);
    if (n > 0) {
      throttle(static_cast<std::size_t>(n));
      bytes = bytes.subspan(static_cast<std::size_t>(n));
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return Error::from_errno("send", errno);
    pollfd p{peer.socket.fd(), POLLOUT, 0};
    if (::poll(&p, 1, 20000) <= 0) return Error(Errc::timed_out, "send");
  }
  return {};
}

Status FakeAgent::hang_up(Peer& peer) {
  // Closing at once with requests unread would be a reset, which throws away what the peer has not read yet.
  ::shutdown(peer.socket.fd(), SHUT_WR);
  std::byte rest[256];
  const Deadline limit = soon();
  while (!stop_ && !limit.passed()) {
    if (::recv(peer.socket.fd(), rest, sizeof rest, MSG_DONTWAIT) == 0) {
      ++hangups_seen_;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Error(Errc::aborted, "hung up");
}

Status FakeAgent::send_error(Peer& peer, std::uint64_t request, Errc code, const std::string& text) {
  wire::ErrorMessage message;
  message.code = code;
  message.message = text;
  return peer.socket.send(request, message, soon());
}

}  // namespace deltasync::test
