#include "receiver/pull/fetch_round.hpp"

#include <iterator>
#include <utility>

namespace deltasync::receiver {

FetchRound::FetchRound(std::vector<Item> items, const CallContext& until, std::size_t streams)
    : until_(until),
      queue_(std::make_move_iterator(items.begin()), std::make_move_iterator(items.end())),
      unfinished_(queue_.size()),
      streams_(streams),
      over_(queue_.empty()),
      on_stop_(until.stop(), OnStop{this}) {}

void FetchRound::OnStop::operator()() const {
  round->finish(FetchRoundEnd::failed, Error(Errc::cancelled, "a stop was requested"));
}

std::optional<Item> FetchRound::take() {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline().at(), [this] { return over_ || !queue_.empty(); });
  if (!over_ && (queue_.empty() || deadline().passed())) {
    finish_locked(FetchRoundEnd::failed, Error(Errc::timed_out, "the deadline passed"));
  }
  if (over_) return std::nullopt;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  return item;
}

std::optional<Item> FetchRound::take_ahead(std::size_t streams) {
  const std::lock_guard lock(mutex_);
  // Streams that always have something under way never come to take().
  if (deadline().passed()) finish_locked(FetchRoundEnd::failed, Error(Errc::timed_out, "the deadline passed"));
  if (over_ || queue_.size() < streams) return std::nullopt;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  return item;
}

void FetchRound::done() {
  const std::lock_guard lock(mutex_);
  if (--unfinished_ != 0) return;
  over_ = true;
  changed_.notify_all();
}

void FetchRound::give_back(Item item) {
  if (item.ranges.empty()) return done();
  const std::lock_guard lock(mutex_);
  queue_.push_front(std::move(item));
  changed_.notify_one();
}

void FetchRound::finish_locked(FetchRoundEnd end, Error error) {
  if (over_) return;
  over_ = true;
  result_.end = end;
  result_.error = std::move(error);
  stop_.request_stop();  // under the lock: its callbacks shut sockets down and come back to nobody
  changed_.notify_all();
}

void FetchRound::finish(FetchRoundEnd end, Error error) {
  const std::lock_guard lock(mutex_);
  finish_locked(end, std::move(error));
}

void FetchRound::left(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (--streams_ == 0) finish_locked(FetchRoundEnd::busy, why);
}

bool FetchRound::over() const {
  const std::lock_guard lock(mutex_);
  return over_;
}

void FetchRound::restarted(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  ++result_.stream_restarts;
  result_.noted = why;
}

void FetchRound::pause(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline().earlier(Deadline::after(time)).at(), [this] { return over_; });
}

FetchRoundResult FetchRound::result() const {
  const std::lock_guard lock(mutex_);
  return result_;
}

}  // namespace deltasync::receiver
