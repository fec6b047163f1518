// The frames of a delta that is made of others, on all threads of a pool.
#pragma once

#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/thread_pool.hpp"
#include "delta/frame.hpp"
#include "delta/work_status.hpp"

namespace deltasync::delta {

/// make(builder, i) gives the i-th of `count` frames, in the order of their tiles; an empty one is left out, and
/// nothing means that there can be no such delta. Each worker has a builder of its own from new_builder(), a
/// std::unique_ptr; its stats() count what it made. `what` names the work in errors; `cancel` may be null. The delta
/// has frames and what they add up to, no more.
template <class NewBuilder, class Make>
Result<std::optional<Delta>> make_frames(const char* what, std::size_t count, const std::atomic<bool>* cancel,
                                         ThreadPool& pool, const NewBuilder& new_builder, const Make& make) {
  std::vector<Frame> frames(count);
  std::vector<decltype(new_builder())> builders(pool.size());
  WorkStatus status(what, cancel);
  pool.run(count, [&](std::uint64_t i, unsigned worker) {
    if (status.over()) return;
    try {
      if (builders[worker] == nullptr) builders[worker] = new_builder();
      Result<std::optional<Frame>> frame = make(*builders[worker], i);
      if (!frame || !*frame) {
        status.end(frame ? Status() : std::move(frame).error());
      } else {
        frames[i] = std::move(**frame);
      }
    } catch (const std::bad_alloc&) {
      status.end_without_memory();
    }
  });
  DS_ASSIGN(const bool possible, status.finish());
  if (!possible) return std::optional<Delta>();
  Delta delta;
  take_frames(frames, delta);
  for (const auto& builder : builders) {
    if (builder != nullptr) add_to_stats(builder->stats(), delta.stats);
  }
  return std::optional<Delta>(std::move(delta));
}

}  // namespace deltasync::delta
