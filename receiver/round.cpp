#include "receiver/round.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace deltasync::receiver {

Round::Round(std::vector<Item> items, Deadline deadline)
    : deadline_(deadline),
      queue_(std::make_move_iterator(items.begin()), std::make_move_iterator(items.end())),
      unfinished_(queue_.size()),
      over_(queue_.empty()) {}

std::optional<Item> Round::take() {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline_.at(), [this] { return over_ || !queue_.empty(); });
  if (!over_ && (queue_.empty() || deadline_.passed())) {
    finish_locked(RoundEnd::failed, Error(Errc::timed_out, "the deadline passed"));
  }
  if (over_) return std::nullopt;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  return item;
}

std::optional<Item> Round::take_ahead(std::size_t streams) {
  const std::lock_guard lock(mutex_);
  if (over_ || queue_.size() < streams) return std::nullopt;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  return item;
}

void Round::done() {
  const std::lock_guard lock(mutex_);
  if (--unfinished_ != 0) return;
  over_ = true;
  changed_.notify_all();
}

void Round::give_back(Item item) {
  if (item.ranges.empty()) return done();
  const std::lock_guard lock(mutex_);
  queue_.push_front(std::move(item));
  changed_.notify_one();
}

void Round::finish_locked(RoundEnd end, Error error) {
  if (over_) return;
  over_ = true;
  result_.end = end;
  result_.error = std::move(error);
  for (const int fd : watched_) ::shutdown(fd, SHUT_RDWR);
  changed_.notify_all();
}

void Round::finish(RoundEnd end, Error error) {
  const std::lock_guard lock(mutex_);
  finish_locked(end, std::move(error));
}

bool Round::over() const {
  const std::lock_guard lock(mutex_);
  return over_;
}

void Round::restarted(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  ++result_.stream_restarts;
  result_.noted = why;
}

void Round::pause(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline_.earlier(Deadline::after(time)).at(), [this] { return over_; });
}

void Round::watch(int interrupt_fd) {
  const std::lock_guard lock(mutex_);
  watched_.push_back(interrupt_fd);
  if (over_) ::shutdown(interrupt_fd, SHUT_RDWR);
}

void Round::unwatch(int interrupt_fd) {
  const std::lock_guard lock(mutex_);
  watched_.erase(std::remove(watched_.begin(), watched_.end(), interrupt_fd), watched_.end());
}

RoundResult Round::result() const {
  const std::lock_guard lock(mutex_);
  return result_;
}

}  // namespace deltasync::receiver
