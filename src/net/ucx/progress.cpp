#include "net/ucx/progress.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/thread_pool.hpp"

namespace deltasync::net::ucx {
namespace {

constexpr int kLookMs = 20;                           ///< at links that have left: their deadlines
constexpr auto kHaltLimit = std::chrono::seconds(1);  ///< to send what the channels that are gone have put

}  // namespace

Result<std::unique_ptr<Progress>> Progress::make(const std::string& name) {
  std::unique_ptr<Progress> made(new Progress());
  made->poll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  made->wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made->poll_ || !made->wake_) return Error::from_errno("a descriptor for UCX", errno);
  epoll_event wake{};
  wake.events = EPOLLIN | EPOLLET;
  wake.data.ptr = nullptr;
  if (::epoll_ctl(made->poll_.get(), EPOLL_CTL_ADD, made->wake_.get(), &wake) != 0) {
    return Error::from_errno("epoll_ctl", errno);
  }
  try {
    made->thread_ = std::thread([self = made.get(), name] {
      set_thread_name(name);
      self->run();
    });
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "a thread for UCX: " + e.code().message());
  }
  return made;
}

Progress::~Progress() {
  halt();
}

void Progress::ask_halt() {
  halting_ = true;
  ::eventfd_write(wake_.get(), 1);
}

void Progress::halt() {
  if (!thread_.joinable()) return;
  ask_halt();
  thread_.join();
}

void Progress::poke(const std::shared_ptr<Link>& link) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = poked_.empty();
    if (std::find(poked_.begin(), poked_.end(), link) == poked_.end()) poked_.push_back(link);
  }
  if (first) ::eventfd_write(wake_.get(), 1);
}

void Progress::take_poked() {
  std::vector<std::shared_ptr<Link>> poked;
  {
    const std::lock_guard lock(mutex_);
    poked.swap(poked_);
  }
  for (std::shared_ptr<Link>& link : poked) {
    Link* const one = link.get();
    if (links_.emplace(one, std::move(link)).second) {
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.ptr = one;
      ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, one->event_fd(), &event);
    }
    if (std::find(due_.begin(), due_.end(), one) == due_.end()) due_.push_back(one);
  }
}

/// True if some link has more to do.
bool Progress::pump_due() {
  std::vector<Link*> due;
  due.swap(due_);
  for (Link* const link : due) {
    switch (link->pump()) {
      case Link::Pumped::again: due_.push_back(link); break;
      case Link::Pumped::idle: break;
      case Link::Pumped::over: drop(link); break;
    }
  }
  return !due_.empty();
}

void Progress::drop(Link* link) {
  ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, link->event_fd(), nullptr);
  const auto found = links_.find(link);
  if (link->abandoned()) static_cast<void>(new std::shared_ptr<Link>(found->second));  // never freed
  links_.erase(found);
}

void Progress::run() {
  std::array<epoll_event, 32> events{};
  std::optional<Link::Clock::time_point> end;
  for (;;) {
    take_poked();
    if (halting_ && !end) {
      end = Link::Clock::now() + kHaltLimit;
      for (const auto& entry : links_) {
        if (!entry.second->leaves()) entry.second->halt();
        due_.push_back(entry.first);
      }
      std::sort(due_.begin(), due_.end());
      due_.erase(std::unique(due_.begin(), due_.end()), due_.end());
    }
    const bool more = pump_due();
    if (end && (links_.empty() || Link::Clock::now() >= *end)) break;
    const bool looks =
        end || std::any_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second->leaves(); });
    const int n =
        ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()), more ? 0 : (looks ? kLookMs : -1));
    for (int i = 0; i < n; ++i) {
      auto* const link = static_cast<Link*>(events[static_cast<std::size_t>(i)].data.ptr);
      if (link != nullptr && std::find(due_.begin(), due_.end(), link) == due_.end()) due_.push_back(link);
    }
    if (n == 0 && looks) {
      for (const auto& entry : links_) {
        if (entry.second->leaves() && std::find(due_.begin(), due_.end(), entry.first) == due_.end()) {
          due_.push_back(entry.first);
        }
      }
    }
  }
  for (auto& entry : links_) static_cast<void>(new std::shared_ptr<Link>(entry.second));  // libucp still uses them
}

}  // namespace deltasync::net::ucx
