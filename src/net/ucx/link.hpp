// One channel's two byte streams over UCX: a worker and an endpoint of its own, so that what becomes of one connection
// is no other's business. Bytes go as active messages of at most kMessageBytes into a window that the other side has
// room for; what its user has taken is told back. All of UCX is called on the link's progress thread; the user's side
// only copies to and from the link's memory, and neither waits for the other.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "net/ucx/library.hpp"

namespace deltasync::net::ucx {

class Progress;

/// What the other side of a channel must know, told over the channel's socket.
struct Offer {
  Digest128 id;               ///< random: who does not know it puts no bytes into the channel
  std::uint32_t version = 0;  ///< of its libucp: major << 16 | minor
  std::vector<std::byte> address;
};

/// That may be on their way, or wait for the user at the other end. Both sides have the same; no message crosses a
/// multiple of it.
inline constexpr std::uint64_t kWindowBytes = 1u << 20;
inline constexpr std::uint64_t kMessageBytes = 128u << 10;
inline constexpr unsigned kMessageId = 1;  ///< UCX's, of all messages of channels

/// Bytes of the stream from `at` to where its window begins again.
inline std::uint64_t until_wrap(std::uint64_t at) {
  return kWindowBytes - at % kWindowBytes;
}

class Link {
 public:
  using Clock = std::chrono::steady_clock;

  /// `progress` outlives it. `wanted`: transports that may carry its bytes, empty: any.
  static Result<std::shared_ptr<Link>> make(const Library& lib, Context* context, Progress& progress,
                                            std::vector<std::string> wanted);
  /// On the progress thread, or where it was made if it never was connected.
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const Offer& offer() const noexcept { return offer_; }
  Progress& progress() const noexcept { return progress_; }

  // ---- the user's side: one thread at a time. After put(), put_file(), take() and leave() the progress thread is to
  // be poked.
  void connect(Offer peer) { peer_ = std::move(peer); }
  /// An edge with each change that came after look().
  int wake_fd() const noexcept { return wake_.get(); }
  struct Look {
    bool connected = false;
    std::uint64_t to_take = 0;
    std::uint64_t room = 0;
    std::uint64_t received = 0;  ///< in all, those that were taken included
    std::optional<Error> error;
  };
  Look look();
  /// How many bytes there were, or was room for.
  std::size_t take(std::span<const iovec> to);
  std::size_t put(std::span<const iovec> from);
  Result<std::size_t> put_file(int file, off_t offset, std::size_t bytes);
  std::uint64_t put_in_all() const;
  /// By the channel's end. What was put is sent still if the other side was told how much that is.
  void leave(bool linger);
  std::string transports() const;

  // ---- the progress thread's
  enum class Pumped : std::uint8_t {
    again,  ///< there is more to do
    idle,   ///< until event_fd() is readable or somebody pokes
    over,   ///< it has left, and may be destroyed unless it is abandoned
  };
  Pumped pump();
  int event_fd() const noexcept { return event_fd_; }
  /// Its channel is gone: its deadlines want a look now and then.
  bool leaves() const;
  /// libucp did not end what was under way, and may still write to this link's memory: it must stay for good.
  bool abandoned() const noexcept { return abandoned_; }
  /// Nothing more is to be had of it: the process ends.
  void halt();

 private:
  enum class Kind : std::uint32_t { hello = 1, data = 2, taken = 3, leave = 4, left = 5 };
  struct Head {
    Digest128 id;
    Kind kind;
    std::uint32_t zero;
    std::uint64_t number;  ///< data: the first byte's place in the stream; taken: how many were; leave: how many are
  };
  static_assert(sizeof(Head) == 32);
  struct Sending {
    Link* link;
    Head head;
    std::uint64_t end;
  };
  struct Fetching {
    Link* link;
    std::uint64_t begin;
  };
  struct Described {
    void* data;
    std::uint64_t begin;
    std::size_t bytes;
  };
  struct Piece {
    std::uint64_t end;
    bool here;
  };

  Link(const Library& lib, Progress& progress, std::vector<std::string> wanted)
      : lib_(lib), progress_(progress), wanted_(std::move(wanted)) {}
  Status open(Context* context);
  void start();
  bool post();
  bool fetch();
  void check_transports();
  bool is_all_heard(std::uint64_t put);
  bool may_go();
  void close_endpoint();
  bool send(Kind kind, std::uint64_t number, const std::byte* data, std::size_t bytes);
  void sent(const Sending& what, UcsStatus status);
  UcsStatus heard(const Head& head, void* data, std::size_t bytes, bool rendezvous);
  bool expects(std::uint64_t begin, std::size_t bytes) const;
  void here(std::uint64_t begin);
  void fail(Error error);
  void fail(const char* what, UcsStatus status);
  void wake_locked();

  static UcsStatus on_message(void* arg, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                              const MessageParams* params);
  static void on_sent(void* request, UcsStatus status, void* user_data);
  static void on_fetched(void* request, UcsStatus status, std::size_t bytes, void* user_data);
  static void on_error(void* arg, Ep* ep, UcsStatus status);

  const Library& lib_;
  Progress& progress_;
  const std::vector<std::string> wanted_;
  Offer offer_;
  Offer peer_;  ///< constant once the progress thread has it
  UniqueFd wake_;

  // The progress thread's.
  Worker* worker_ = nullptr;
  Ep* ep_ = nullptr;
  int event_fd_ = -1;
  bool started_ = false;
  bool greeted_ = false;  ///< by the other side
  bool failed_ = false;
  std::uint64_t sent_ = 0;
  std::uint64_t told_taken_ = 0;
  std::uint64_t taken_there_ = 0;                ///< by the other side's user
  std::map<std::uint64_t, std::uint64_t> gone_;  ///< sent and out of our memory, by their first byte; beyond done_
  std::map<std::uint64_t, Piece> pieces_;        ///< received or coming, by their first byte; beyond ready_
  std::vector<Described> described_;             ///< to be fetched
  unsigned requests_ = 0;                        ///< under way
  void* close_ = nullptr;
  bool said_leave_ = false;
  bool heard_leave_ = false;
  bool may_leave_ = false;                    ///< the other side has all, or nobody reads there
  std::optional<std::uint64_t> leaves_with_;  ///< how many bytes it sends in all, from the other side; until answered
  bool abandoned_ = false;
  std::optional<Clock::time_point> leaves_at_;

  mutable std::mutex mutex_;
  std::vector<std::byte> out_;  ///< byte i of the stream at i % kWindowBytes; [done_, put_) is the user's data
  std::vector<std::byte> in_;   ///< likewise; [taken_, ready_)
  std::uint64_t put_ = 0;       // protected by mutex_, as all below
  std::uint64_t done_ = 0;      ///< sent, and their place is free
  std::uint64_t ready_ = 0;     ///< received without a gap
  std::uint64_t taken_ = 0;     ///< by our user
  bool connected_ = false;
  bool waiting_ = false;  ///< the user looked last
  bool leaving_ = false;
  bool lingers_ = false;
  std::optional<Error> error_;
  std::string transports_;
};

}  // namespace deltasync::net::ucx
