#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "net/ucx/ucx.hpp"

namespace deltasync::net::ucx {
namespace {

/// All that is said over the socket once the channel has it.
struct Word {
  static constexpr std::uint32_t kMagic = 0x58554344;  // "DCUX"
  enum class Says : std::uint32_t {
    end = 1,    ///< nothing follows the first `bytes` of the stream
    there = 2,  ///< nothing: a closed socket answers it with a reset
  };
  std::uint32_t magic = kMagic;
  Says says;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(Word) == 16);

constexpr unsigned kWordsMax = 4096;  ///< at once; one goes out with each try to send to a peer that has closed

class UcxChannel final : public Channel {
 public:
  UcxChannel(std::shared_ptr<Ucx> ucx, int fd, std::shared_ptr<Link> link)
      : ucx_(std::move(ucx)), fd_(fd), link_(std::move(link)), poll_(::epoll_create1(EPOLL_CLOEXEC)) {
    // Edges: what was seen is seen, and is no reason to wake again. A peer that closes is one.
    watch(fd_, EPOLLIN | EPOLLRDHUP | EPOLLET);
    watch(link_->wake_fd(), EPOLLIN | EPOLLET);
  }
  ~UcxChannel() override {
    link_->leave(said_end_);
    if (begun_) poke();
  }

  Result<Tried> handshake() override {
    if (!poll_) return Error(Errc::no_space, "a descriptor for a UCX channel");
    if (!std::exchange(begun_, true)) poke();
    DS_ASSIGN(const Link::Look look, news());
    if (look.error) return *look.error;
    if (look.connected) {
      ucx_->note(link_->transports());
      return Tried::moved(0);
    }
    if (closed_) return gone();
    return Tried{Tried::Came::wants_read};
  }
  const char* handshake_name() const override { return "waiting for the UCX handshake"; }
  bool peer_may_be_plain() const override { return false; }
  int waits_on() const override { return poll_.get(); }
  std::string transports() const override { return link_->transports(); }

  Result<Tried> receive(std::span<const iovec> to) override {
    if (const std::size_t bytes = take(to); bytes > 0) return Tried::moved(bytes);
    DS_ASSIGN(const Link::Look look, news());
    if (look.to_take > 0) return Tried::moved(take(to));
    if (ends_at_ && look.received >= *ends_at_) return Tried{Tried::Came::ended};
    if (look.error) return *look.error;
    if (closed_ && (!ends_at_ || is_shut())) return gone();
    return Tried{Tried::Came::wants_read};
  }

  Result<Tried> send(std::span<const iovec> from) override {
    return try_to_send([&]() -> Result<std::size_t> { return link_->put(from); });
  }
  Result<Tried> send_file(int file, off_t offset, std::size_t bytes) override {
    return try_to_send([&] { return link_->put_file(file, offset, bytes); });
  }

  bool has_input() const override {
    const Link::Look look = link_->look();
    return look.to_take > 0 || look.error || poll_now(fd_, POLLIN) != 0;
  }

  void say_end() noexcept override {
    if (std::exchange(said_end_, true)) return;
    say(Word::Says::end, link_->put_in_all());
  }

 private:
  void watch(int fd, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    if (poll_ && ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) poll_.reset();
  }
  void poke() { link_->progress().poke(link_); }

  std::size_t take(std::span<const iovec> to) {
    const std::size_t bytes = link_->take(to);
    told_ += bytes;
    if (told_ >= kWindowBytes / 4) {  // so much makes the link tell the other side
      told_ = 0;
      poke();
    }
    return bytes;
  }

  template <class Put>
  Result<Tried> try_to_send(Put put) {
    if (failed_) return *failed_;
    DS_ASSIGN(std::size_t bytes, put());
    if (bytes == 0) {
      DS_ASSIGN(const Link::Look look, news());
      if (look.error) return *look.error;
      if (closed_ && (!ends_at_ || is_shut())) return gone();
      // What the peer said last may be on its way, and say why it closed.
      if (reset_ && look.received >= *ends_at_) return gone();
      if (closed_ && !reset_) say(Word::Says::there, 0);
      if (look.room == 0) return Tried{Tried::Came::wants_read};
      DS_ASSIGN(bytes, put());
    }
    poke();
    return Tried::moved(bytes);
  }

  /// How things stand once all that has happened so far has been seen: what comes later wakes who waits.
  Result<Link::Look> news() {
    std::array<epoll_event, 2> seen;
    static_cast<void>(::epoll_wait(poll_.get(), seen.data(), static_cast<int>(seen.size()), 0));
    DS_TRY(hear());
    return link_->look();
  }

  /// The peer's words.
  Status hear() {
    if (failed_) return *failed_;
    for (unsigned words = 0; words < kWordsMax;) {
      const ssize_t n = ::recv(fd_, heard_.data() + heard_bytes_, heard_.size() - heard_bytes_, MSG_DONTWAIT);
      if (n == 0) {
        closed_ = true;
        return {};
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return {};
      if (n < 0) {
        closed_ = true;
        reset_ = true;
        return {};
      }
      heard_bytes_ += static_cast<std::size_t>(n);
      if (heard_bytes_ < heard_.size()) continue;
      heard_bytes_ = 0;
      Word word{};
      std::memcpy(&word, heard_.data(), sizeof word);
      const bool end = word.says == Word::Says::end && !ends_at_;
      if (word.magic != Word::kMagic || (!end && word.says != Word::Says::there)) {
        failed_ = Error(Errc::protocol, "the peer says what is no word of a UCX channel");
        return *failed_;
      }
      if (end) ends_at_ = word.bytes;
      ++words;
    }
    failed_ = Error(Errc::protocol, "the peer floods the socket of a UCX channel");
    return *failed_;
  }

  /// Best effort: a few bytes that nobody is to wait for.
  void say(Word::Says says, std::uint64_t bytes) noexcept {
    const Word word{Word::kMagic, says, bytes};
    static_cast<void>(::send(fd_, &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT));
  }

  /// By a stop on this side, and not because both sides have ended.
  bool is_shut() const { return !said_end_ && !reset_ && (poll_now(fd_, 0) & POLLHUP) != 0; }
  static Error gone() { return {Errc::connection, "the peer closed the connection of a UCX channel"}; }

  const std::shared_ptr<Ucx> ucx_;  ///< outlives link_
  const int fd_;
  const std::shared_ptr<Link> link_;
  UniqueFd poll_;
  bool begun_ = false;
  bool said_end_ = false;
  bool closed_ = false;                   ///< the socket, by the peer
  bool reset_ = false;                    ///< likewise, and it hears nothing any more
  std::optional<std::uint64_t> ends_at_;  ///< the peer's stream
  std::optional<Error> failed_;
  std::uint64_t told_ = 0;
  std::array<std::byte, sizeof(Word)> heard_{};
  std::size_t heard_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Channel> Ucx::channel(int fd, std::shared_ptr<Link> link, Offer peer) {
  link->connect(std::move(peer));
  return std::make_unique<UcxChannel>(shared_from_this(), fd, std::move(link));
}

}  // namespace deltasync::net::ucx
