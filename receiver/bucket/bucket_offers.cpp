// Until a version begins: who connects, and what they offer.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "base/log.hpp"
#include "format/wire_bucket.hpp"
#include "net/channel.hpp"
#include "receiver/bucket/bucket_receiver.hpp"
#include "receiver/bucket/readable.hpp"
#include "receiver/side_files.hpp"

namespace deltasync::receiver {
namespace {

constexpr auto kMessageLimit = std::chrono::seconds(5);  // from its first byte
constexpr std::size_t kStrangersMax = 64;                // a trainer that is dropped comes again

}  // namespace

Status wait_readable(std::vector<pollfd>& fds, const CallContext& until, const char* what) {
  UniqueFd wake;
  if (until.stop().stop_possible()) {
    wake.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake) return Error::from_errno("eventfd", errno);
    fds.push_back({wake.get(), POLLIN, 0});
  }
  const auto on_stop = [fd = wake.get()] { ::eventfd_write(fd, 1); };
  const std::stop_callback callback(until.stop(), on_stop);
  for (;;) {
    if (until.stop_requested()) return cancelled_while(what);
    const auto left = until.deadline().remaining();
    const timespec t{static_cast<std::time_t>(left.count() / 1'000'000'000),
                     static_cast<long>(left.count() % 1'000'000'000)};
    const int n = ::ppoll(fds.data(), fds.size(), &t, nullptr);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Error::from_errno("poll", errno);
    if (until.stop_requested()) return cancelled_while(what);
    if (n == 0) return Error(Errc::timed_out, what);
    if (wake) fds.pop_back();
    return {};
  }
}

Result<bool> BucketReceiver::hear_one(const CallContext& until, Deadline patience) {
  std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
  for (const UniqueFd& stranger : strangers_) fds.push_back({stranger.get(), POLLIN | POLLRDHUP, 0});
  const std::size_t first = fds.size();
  for (const auto& session : sessions_) {
    // One that has made its offer says nothing more until that is answered; but it may go. (A dead process is dropped
    // when all ranks have offered, or another comes.)
    fds.push_back({session->fd(), static_cast<short>(session->offer ? POLLRDHUP : POLLIN | POLLRDHUP), 0});
  }
  Status ready = wait_readable(fds, until.earlier(patience), "waiting for the trainer's next version");
  if (!ready && ready.error().code() == Errc::timed_out) return false;
  if (!ready) return std::move(ready).error();
  for (std::size_t i = sessions_.size(); i-- > 0;) {
    if (fds[first + i].revents == 0) continue;
    BucketSession& session = *sessions_[i];
    Status heard = session.offer ? Status(Error(Errc::connection, "it has gone")) : hear_offer(session, until);
    if (heard) continue;
    log::info("bucket_channel drops trainer=\"{}\" why=\"{}\"", session.name(), heard.error().to_string());
    session.refuse(heard.error());
    sessions_.erase(sessions_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (std::size_t i = first - 1; i-- > 0;) {
    if (fds[i + 1].revents == 0) continue;
    UniqueFd connection = std::move(strangers_[i]);
    strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i));
    greet(std::move(connection), until);
  }
  if (fds[0].revents != 0) DS_TRY(accept());
  return true;
}

/// One that stands still before its first word is in nobody's way. One that cannot be accepted stays where it is.
Status BucketReceiver::accept() {
  UniqueFd connection(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection && (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR)) return {};
  if (!connection) return Error::from_errno("accepting a trainer", errno);
  if (strangers_.size() == kStrangersMax) {
    log::warn("bucket_channel drops why=\"{} connections are silent: this is the oldest\"", kStrangersMax);
    strangers_.erase(strangers_.begin());
  }
  strangers_.push_back(std::move(connection));
  return {};
}

void BucketReceiver::greet(UniqueFd connection, const CallContext& until) {
  auto greeting = BucketSession::greet(std::move(connection), until);
  Status admitted = greeting ? admit(std::move(*greeting), until) : Status(std::move(greeting).error());
  if (!admitted) log::warn("bucket_channel refuses why=\"{}\"", admitted.error().to_string());
}

/// A rank that connects again has lost what it had; ranks of another number are another trainer's, once these are gone.
Status BucketReceiver::admit(BucketSession::Greeting greeting, const CallContext& until) {
  BucketSession& session = *greeting.session;
  const auto refuse = [&](Error why) -> Status {
    session.refuse(why);
    return why;
  };
  drop_gone();
  if (layout_ != nullptr && greeting.layout->digest() != layout_->digest()) {
    return refuse(Error(Errc::layout_mismatch, session.name() + " has another layout (" +
                                                   to_string(greeting.layout->digest()) + ") than the engine (" +
                                                   to_string(layout_->digest()) + "): make the receiver again"));
  }
  for (const auto& known : sessions_) {
    if (known->rank() == session.rank()) {
      return refuse(Error(Errc::already_exists, known->name() + " is connected already"));
    }
    if (greeting.ranks != ranks_) {
      return refuse(Error(Errc::invalid_argument, session.name() + " is of " + std::to_string(greeting.ranks) +
                                                      " ranks, " + known->name() + " of " + std::to_string(ranks_)));
    }
  }
  DS_TRY(session.answer(greeting.request, until));
  if (layout_ == nullptr) {
    layout_ = greeting.layout;
    sidecar_ = std::move(greeting.sidecar);
  } else {
    session.same_files = check_same_files(sidecar_, greeting.sidecar);
  }
  ranks_ = greeting.ranks;
  sessions_.push_back(std::move(greeting.session));
  return {};
}

bool BucketReceiver::drop_gone() {
  return std::erase_if(sessions_, [](const auto& session) {
           const bool gone = session->peer_closed();
           if (gone) log::info("bucket_channel drops trainer=\"{}\" why=\"it has gone\"", session->name());
           return gone;
         }) != 0;
}

Status BucketReceiver::hear_offer(BucketSession& session, const CallContext& until) {
  session.stop_on(until.stop());
  auto heard = session.receive(until.earlier(Deadline::after(kMessageLimit)));
  session.stop_on({});
  DS_ASSIGN(const net::Message message, std::move(heard));
  if (message.type() == wire::Type::error) return Error(Errc::aborted, "it has given up");
  if (message.type() != wire::Type::bucket_begin) {
    return Error(Errc::protocol, wire::describe(message.header) + " came where a bucket_begin was due");
  }
  DS_ASSIGN(wire::BucketBegin begin, wire::BucketBegin::decode(message.payload));
  if (begin.version.id == VersionId{}) {
    const TargetState* const committed = target_->committed();
    const wire::BucketHeld held{committed != nullptr ? committed->version.id.epoch : 0};
    return session.answer(message.header.request, until, held.encode());
  }
  if (!begin.version.id.valid()) return Error(Errc::invalid_argument, "a version with epoch 0 cannot be committed");
  status_->offered(begin.version);
  session.offer = BucketSession::Offer{std::move(begin.version), message.header.request};
  return {};
}

/// Every tensor is sent, by one rank.
Status BucketReceiver::check_shares() const {
  std::string missing;
  std::size_t lacking = 0;
  for (std::uint32_t t = 0; t < layout_->tensors().size(); ++t) {
    const BucketSession* sends = nullptr;
    for (const auto& session : sessions_) {
      if (!session->share().has(t)) continue;
      if (sends != nullptr) {
        return Error(Errc::coverage,
                     layout_->tensors()[t].spec.name + " is sent by " + sends->name() + " and by " + session->name());
      }
      sends = session.get();
    }
    if (sends == nullptr && ++lacking <= 8) missing += (lacking == 1 ? "" : ", ") + layout_->tensors()[t].spec.name;
  }
  if (lacking == 0) return {};
  const std::string more = lacking > 8 ? " and " + std::to_string(lacking - 8) + " more" : "";
  return Error(Errc::coverage, "no rank sends " + missing + more);
}

/// No old ones end up beside new tensors.
Status BucketReceiver::check_side_files() const {
  if (!target_->capabilities().writes_side_files) return {};
  for (const auto& session : sessions_) {
    if (!session->same_files) return Status(session->same_files).with_context(session->name());
  }
  return {};
}

Status BucketReceiver::suits(const Version& version, const Want& want) const {
  const std::string offered = "version " + to_string(version) + " is offered, ";
  if (want.number) {
    const bool epoch = want.epoch == 0 || want.epoch == version.id.epoch;
    if (epoch && version.id.number == *want.number) return {};
    const Errc code = epoch && version.id.number > *want.number ? Errc::gone : Errc::version_conflict;
    return Error(code, offered + "number " + std::to_string(*want.number) + " is wanted");
  }
  if (!want.label.empty()) {
    if (version.label == want.label) return {};
    return Error(Errc::version_conflict, offered + "'" + want.label + "' is wanted");
  }
  const TargetState* const committed = target_->committed();
  if (!want.newer || committed == nullptr || committed->version.id.epoch != version.id.epoch) return {};
  if (version.id.number > committed->version.id.number) return {};
  return Error(Errc::version_conflict, offered + "the engine has " + to_string(committed->version));
}

void BucketReceiver::refuse_all(const Error& why) {
  for (const auto& session : sessions_) session->refuse(why);
  sessions_.clear();
}

Result<std::optional<Version>> BucketReceiver::agree(const Want& want, const CallContext& until) {
  const bool named = want.number || !want.label.empty();
  const bool newest = !named && !want.newer;
  const Deadline patience = want.wait_max ? Deadline::after(*want.wait_max) : until.deadline();
  for (;;) {
    const auto offers = std::count_if(sessions_.begin(), sessions_.end(), [](const auto& s) { return !!s->offer; });
    const bool all = ranks_ != 0 && static_cast<std::uint32_t>(offers) == ranks_;
    if (!all) {
      // The newest may be the one that is held: what nobody offers now is not waited for.
      const bool look = newest && offers == 0 && target_->committed() != nullptr;
      DS_ASSIGN(const bool heard, hear_one(until, look ? Deadline::after({}) : patience));
      if (!heard && look) return std::optional<Version>();
      if (!heard) {
        return Error(Errc::timed_out, "the trainer has not begun the version: " + std::to_string(offers) + " of " +
                                          std::to_string(ranks_) + " ranks offer one");
      }
      continue;
    }
    if (drop_gone()) continue;  // the offer and the end of one were heard together
    const Version version = sessions_.front()->offer->version;
    Status agreed = check_shares();
    if (agreed) agreed = check_side_files();
    for (const auto& session : sessions_) {
      if (agreed && session->offer->version.id != version.id) {
        agreed = Error(Errc::version_conflict, sessions_.front()->name() + " offers " + to_string(version) + ", " +
                                                   session->name() + " " + to_string(session->offer->version));
      }
    }
    if (!agreed) {
      refuse_all(agreed.error());
      return std::move(agreed).error();
    }
    Status suitable = suits(version, want);
    const bool asked = suitable.ok();
    if (asked && !named) suitable = older_epochs_.check(options_.endpoint, version, target_->committed());
    if (suitable) return std::optional<Version>(version);
    if (suitable.error().code() == Errc::gone) return std::move(suitable).error();
    log::warn("bucket_channel refuses why=\"{}\"", suitable.error().to_string());
    refuse_all(suitable.error());
    if (asked && older_epochs_.policy() == OlderEpoch::fail) return std::move(suitable).error();
  }
}

}  // namespace deltasync::receiver
