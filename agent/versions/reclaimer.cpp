#include "agent/versions/reclaimer.hpp"

#include <new>
#include <utility>

namespace deltasync::agent {

GenerationPtr Reclaimer::keep(std::unique_ptr<Generation> generation) {
  const std::uint64_t number = generation->number;
  {
    const std::lock_guard lock(mutex_);
    mapped_.insert(number);
    held_[number];
    unheld_.reserve(mapped_.size());  // so that take() needs no memory
  }
  GenerationPtr kept{generation.release(), [reclaimer = shared_from_this()](Generation* last) {
                       reclaimer->take(std::unique_ptr<Generation>(last));
                     }};
  const std::lock_guard lock(mutex_);
  held_[number] = kept;
  return kept;
}

void Reclaimer::take(std::unique_ptr<Generation> generation) noexcept {
  {
    const std::lock_guard lock(mutex_);
    held_.erase(generation->number);
    if (!closed_) {
      unheld_.push_back(std::move(generation));
      came_.notify_all();
      return;
    }
    mapped_.erase(generation->number);
  }
  generation.reset();
}

void Reclaimer::retire(std::shared_ptr<const void> thing) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    retired_.push_back(std::move(thing));
    came_.notify_all();
  } catch (const std::bad_alloc&) {
  }
}

void Reclaimer::work() {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    came_.wait(lock, [this] { return closed_ || !unheld_.empty() || !retired_.empty(); });
    lock.unlock();
    clear();
    lock.lock();
  }
}

void Reclaimer::clear() {
  std::unique_lock lock(mutex_);
  while (!retired_.empty()) {
    std::vector<std::shared_ptr<const void>> ended = std::exchange(retired_, {});
    lock.unlock();
    ended.clear();  // a generation that goes with it comes back through take()
    lock.lock();
  }
  while (!unheld_.empty()) {
    std::unique_ptr<Generation> generation = std::move(unheld_.back());
    unheld_.pop_back();
    lock.unlock();
    const std::uint64_t number = generation->number;
    if (before_unmap_) before_unmap_();
    generation.reset();
    lock.lock();
    mapped_.erase(number);
  }
}

void Reclaimer::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    came_.notify_all();
  }
  clear();
}

bool Reclaimer::held(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return held_.count(number) != 0;
}

std::vector<GenerationPtr> Reclaimer::all_held() const {
  std::vector<GenerationPtr> all;
  const std::lock_guard lock(mutex_);
  all.reserve(held_.size());
  for (const auto& [number, generation] : held_) {
    if (auto still = generation.lock()) all.push_back(std::move(still));
  }
  return all;
}

bool Reclaimer::has(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return mapped_.count(number) != 0;
}

}  // namespace deltasync::agent
