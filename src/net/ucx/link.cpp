// A link is made, and what its channel asks of it: any thread.
#include "net/ucx/link.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "net/auth.hpp"

namespace deltasync::net::ucx {
Result<std::shared_ptr<Link>> Link::make(const Library& lib, Context* context, Progress& progress,
                                         std::vector<std::string> wanted) {
  std::shared_ptr<Link> link(new Link(lib, progress, std::move(wanted)));
  DS_TRY(link->open(context));
  return link;
}

Status Link::open(Context* context) {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) return Error::from_errno("eventfd", errno);
  const std::array<std::uint64_t, 2> random{make_random_id(), make_random_id()};
  std::memcpy(offer_.id.bytes.data(), random.data(), sizeof random);
  WorkerParams params{};
  params.field_mask = kWorkerThreadMode;
  params.thread_mode = kThreadsSerialized;
  const auto good = [&](UcsStatus status, const char* call) -> Status {
    if (status == kOk) return {};
    return Error(Errc::no_space, std::string("UCX: ") + call + ": " + lib_.words(status));
  };
  DS_TRY(good(lib_.worker_create(context, &params, &worker_), "ucp_worker_create"));
  HandlerParams handler{};
  handler.field_mask = kHandlerId | kHandlerCall | kHandlerArg;
  handler.id = kMessageId;
  handler.cb = on_message;
  handler.arg = this;
  DS_TRY(good(lib_.worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler"));
  DS_TRY(good(lib_.worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd"));
  Address* address = nullptr;
  std::size_t bytes = 0;
  DS_TRY(good(lib_.worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address"));
  const auto* const first = reinterpret_cast<const std::byte*>(address);
  offer_.version = lib_.version_number;
  offer_.address.assign(first, first + bytes);
  lib_.worker_release_address(worker_, address);
  out_.resize(kWindowBytes);
  in_.resize(kWindowBytes);
  return {};
}

Link::~Link() {
  if (worker_ != nullptr) lib_.worker_destroy(worker_);
}

Link::Look Link::look() {
  const std::lock_guard lock(mutex_);
  waiting_ = true;
  return {connected_, ready_ - taken_, kWindowBytes - (put_ - done_), ready_, error_};
}

std::size_t Link::take(std::span<const iovec> to) {
  std::uint64_t at = 0;
  std::uint64_t ready = 0;
  {
    const std::lock_guard lock(mutex_);
    at = taken_;
    ready = ready_;
  }
  const std::uint64_t from = at;
  for (const iovec& piece : to) {
    for (std::size_t done = 0; done < piece.iov_len && at < ready;) {
      const std::size_t step = std::min(
          {piece.iov_len - done, static_cast<std::size_t>(ready - at), static_cast<std::size_t>(until_wrap(at))});
      std::memcpy(static_cast<std::byte*>(piece.iov_base) + done, &in_[at % kWindowBytes], step);
      done += step;
      at += step;
    }
  }
  const std::lock_guard lock(mutex_);
  taken_ = at;
  return static_cast<std::size_t>(at - from);
}

std::size_t Link::put(std::span<const iovec> from) {
  std::uint64_t at = 0;
  std::uint64_t end = 0;
  {
    const std::lock_guard lock(mutex_);
    at = put_;
    end = done_ + kWindowBytes;
  }
  const std::uint64_t first = at;
  for (const iovec& piece : from) {
    for (std::size_t done = 0; done < piece.iov_len && at < end;) {
      const std::size_t step = std::min(
          {piece.iov_len - done, static_cast<std::size_t>(end - at), static_cast<std::size_t>(until_wrap(at))});
      std::memcpy(&out_[at % kWindowBytes], static_cast<const std::byte*>(piece.iov_base) + done, step);
      done += step;
      at += step;
    }
  }
  const std::lock_guard lock(mutex_);
  put_ = at;
  return static_cast<std::size_t>(at - first);
}

Result<std::size_t> Link::put_file(int file, off_t offset, std::size_t bytes) {
  std::uint64_t at = 0;
  std::size_t step = 0;
  {
    const std::lock_guard lock(mutex_);
    at = put_;
    step = std::min(
        {bytes, static_cast<std::size_t>(done_ + kWindowBytes - at), static_cast<std::size_t>(until_wrap(at))});
  }
  if (step == 0) return std::size_t{0};
  ssize_t got = 0;
  do {
    got = ::pread(file, &out_[at % kWindowBytes], step, offset);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return Error::from_errno("read a file to send", errno);
  if (got == 0) return Error(Errc::io, "the file to send ends early");
  const std::lock_guard lock(mutex_);
  put_ = at + static_cast<std::uint64_t>(got);
  return static_cast<std::size_t>(got);
}

std::uint64_t Link::put_in_all() const {
  const std::lock_guard lock(mutex_);
  return put_;
}

void Link::leave(bool linger) {
  const std::lock_guard lock(mutex_);
  leaving_ = true;
  lingers_ = linger;
}

bool Link::leaves() const {
  const std::lock_guard lock(mutex_);
  return leaving_;
}

std::string Link::transports() const {
  const std::lock_guard lock(mutex_);
  return transports_;
}

void Link::wake_locked() {
  if (!std::exchange(waiting_, false)) return;
  static_cast<void>(::eventfd_write(wake_.get(), 1));
}

void Link::fail(Error error) {
  failed_ = true;
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  wake_locked();
}

void Link::fail(const char* what, UcsStatus status) {
  fail(Error(Errc::connection, std::string("UCX: ") + what + ": " + lib_.words(status)));
}

}  // namespace deltasync::net::ucx
