// A rank with a real receiver, as the tests of the commit over ranks need it: its share of a model in host memory or in
// an engine's own places, an engine that looks at every byte that it serves, and a receiver that can be made to fail.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "commit/participant.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"

namespace deltasync::commit {

using Bytes = std::vector<std::byte>;

/// A tensor's rectangle somewhere in memory.
struct Place {
  std::uint64_t tensor = 0;
  Rect rect;
  std::uint64_t offset = 0;  ///< of its first element
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
};

/// What a rank of two keeps of a model: rows of some tensors, columns of others, all of the rest.
class Share {
 public:
  Share(LayoutPtr layout, std::uint64_t rank, bool placed) : layout_(std::move(layout)), is_placed_(placed) {
    std::uint64_t at = 8;
    for (const Tensor& t : layout_->tensors()) {
      const std::string& name = t.spec.name;
      const char kind = name.front();
      Slice slice{name, std::nullopt};
      if (kind == 'r') slice = *row_slice(*layout_, name, rank, 2);
      if (kind == 'c') slice = *col_slice(*layout_, name, rank, 2);
      slices_.push_back(slice);
      Place p;
      p.tensor = *layout_->find(name);
      p.rect = slice.rect.value_or(Rect{0, 0, t.rows, t.cols});
      p.offset = at;
      const bool transposed = kind == 'c';
      p.row_stride = transposed ? t.element_bytes : p.rect.cols * t.element_bytes;
      p.col_stride = transposed ? p.rect.rows * t.element_bytes : t.element_bytes;
      at += (p.rect.elements() * t.element_bytes + 15) / 8 * 8;  // no two touch
      places_.push_back(p);
    }
    if (is_placed_) memory_.assign(at / 8, kUntouched);
  }

  Result<std::vector<Slice>> bind(Receiver& receiver, Deadline deadline, bool shadowed = false) {
    if (!is_placed_) {
      DS_TRY(receiver.bind(make_host_target(layout_), slices_, deadline));
      return slices_;
    }
    memory_.assign(memory_.size(), kUntouched);
    PlacementPlan plan;
    LiveMemory live;
    live.name = "weights";
    live.base = reinterpret_cast<std::byte*>(memory_.data());
    live.bytes = memory_.size() * 8;
    plan.memories.push_back(live);
    for (const Place& p : places_) {
      plan.slices.push_back({tensor(p).spec.name, p.rect, 0, p.offset, p.row_stride, p.col_stride});
    }
    DS_ASSIGN(plan.ignored, unplaced(*layout_, plan.slices));
    DS_ASSIGN(std::shared_ptr<const Placement> placement, Placement::build(layout_, std::move(plan)));
    DS_ASSIGN(std::unique_ptr<Target> target, make_placed_target(placement));
    if (shadowed) {
      DS_ASSIGN(target, make_shadowed_target(std::move(target)));
    }
    DS_TRY(receiver.bind(std::move(target), placement->slices(), deadline));
    return placement->slices();
  }

  /// Somebody else has had the engine's memory, and left something in the first of its places.
  void overwrite(std::size_t places) {
    for (const Place& p : std::span(places_).first(std::min(places, places_.size()))) {
      std::memset(reinterpret_cast<std::byte*>(memory_.data()) + p.offset, 0x37,
                  p.rect.elements() * tensor(p).element_bytes);
    }
  }

  /// What the engine computes with now: each byte of the engine's memory, or each of the rank's elements in the host's.
  Bytes live(Receiver& receiver) const {
    if (is_placed_) return image_of(memory_);
    return elements_of(host_target_memory(*receiver.target()));
  }
  /// What that has to be with this version.
  Bytes expected(const Bytes& half) const {
    if (!is_placed_) return elements_of(half);
    Bytes image = image_of(std::vector<std::uint64_t>(memory_.size(), kUntouched));
    for (const Place& p : places_) {
      const Tensor& t = tensor(p);
      for (std::uint64_t r = 0; r < p.rect.rows; ++r) {
        for (std::uint64_t c = 0; c < p.rect.cols; ++c) {
          std::memcpy(image.data() + p.offset + r * p.row_stride + c * p.col_stride, half.data() + in_half(p, r, c),
                      t.element_bytes);
        }
      }
    }
    return image;
  }

 private:
  static constexpr std::uint64_t kUntouched = 0xa5a5a5a5a5a5a5a5;

  const Tensor& tensor(const Place& p) const { return layout_->tensors()[p.tensor]; }
  std::uint64_t in_half(const Place& p, std::uint64_t row, std::uint64_t col) const {
    const Tensor& t = tensor(p);
    return t.offset + (p.rect.row + row) * t.row_bytes() + (p.rect.col + col) * t.element_bytes;
  }
  Bytes elements_of(std::span<const std::byte> half) const {
    Bytes bytes;
    if (half.empty()) return bytes;
    for (const Place& p : places_) {
      for (std::uint64_t r = 0; r < p.rect.rows; ++r) {
        const auto row = half.subspan(in_half(p, r, 0), p.rect.cols * tensor(p).element_bytes);
        bytes.insert(bytes.end(), row.begin(), row.end());
      }
    }
    return bytes;
  }
  static Bytes image_of(const std::vector<std::uint64_t>& words) {
    const auto bytes = std::as_bytes(std::span(words));
    return {bytes.begin(), bytes.end()};
  }

  const LayoutPtr layout_;
  const bool is_placed_;
  std::vector<Slice> slices_;
  std::vector<Place> places_;
  std::vector<std::uint64_t> memory_;
};

/// What the trainer has published, and who serves what. Thread-safe.
class Ledger {
 public:
  void publish(std::uint64_t number, const Bytes& half) {
    const std::lock_guard lock(mutex_);
    halves_[number] = half;
  }
  /// Wrong if another rank serves another version, or the bytes are not the version's.
  void serves(std::uint32_t rank, std::uint64_t number, const Share& share, const Bytes& live) {
    const std::lock_guard lock(mutex_);
    for (const auto& [other, served] : serving_) {
      if (other != rank && served != number)
        say(rank, number, "while rank " + std::to_string(other) + " serves others");
    }
    look(rank, number, share, live, "when it begins to serve");
    serving_[rank] = number;
  }
  /// Wrong if what it served has been written meanwhile.
  void stops(std::uint32_t rank, const Share& share, const Bytes& live) {
    const std::lock_guard lock(mutex_);
    const auto served = serving_.find(rank);
    if (served == serving_.end()) return;
    look(rank, served->second, share, live, "while it serves");
    serving_.erase(served);
  }
  std::optional<std::uint64_t> served_by(std::uint32_t rank) const {
    const std::lock_guard lock(mutex_);
    const auto served = serving_.find(rank);
    return served == serving_.end() ? std::nullopt : std::optional(served->second);
  }
  std::string wrong() const {
    const std::lock_guard lock(mutex_);
    return wrong_;
  }

 private:
  void look(std::uint32_t rank, std::uint64_t number, const Share& share, const Bytes& live, const std::string& when) {
    const auto half = halves_.find(number);
    if (half == halves_.end()) return say(rank, number, "which nobody published");
    if (live != share.expected(half->second)) say(rank, number, "has other bytes " + when);
  }
  void say(std::uint32_t rank, std::uint64_t number, const std::string& what) {
    wrong_ += "rank " + std::to_string(rank) + ", version " + std::to_string(number) + ": " + what + "\n";
  }

  mutable std::mutex mutex_;
  std::map<std::uint64_t, Bytes> halves_;
  std::map<std::uint32_t, std::uint64_t> serving_;
  std::string wrong_;
};

/// A real receiver whose next commits find their deadline passed, if the test says so.
class RankReceiver final : public Receiver {
 public:
  explicit RankReceiver(std::unique_ptr<Receiver> real) : real_(std::move(real)) {}

  const LayoutPtr& layout() const override { return real_->layout(); }
  const Sidecar& sidecar() const override { return real_->sidecar(); }
  Status bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) override {
    return real_->bind(std::move(target), slices, call);
  }
  Target* target() override { return real_->target(); }
  const std::vector<Slice>& slices() const override { return real_->slices(); }
  FullUpdatePolicy full_update_policy() const override { return real_->full_update_policy(); }
  bool supports_rollback() const override { return real_->supports_rollback(); }
  std::optional<Version> current() const override { return real_->current(); }
  Lag lag(const CallOptions& call) const override { return real_->lag(call); }
  std::pair<std::uint64_t, std::uint64_t> progress() const override { return real_->progress(); }
  Result<bool> is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call) override {
    return real_->is_current(staged, want, call);
  }
  Result<std::vector<TileMismatch>> attest(const CallOptions& call) override { return real_->attest(call); }
  using Receiver::repair;
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions& call) override {
    return real_->repair(tiles, call);
  }
  Status release(const CallOptions& call) override { return real_->release(call); }
  Result<RepairReport> restore(const CallOptions& call) override { return real_->restore(call); }
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions& call) override {
    DS_ASSIGN(auto real, real_->pull(want, call));
    mode = real->report().mode;
    return std::unique_ptr<StagedUpdate>(std::make_unique<Staged>(*this, std::move(real)));
  }

  std::atomic<int> late_commits{0};
  std::atomic<int> rollbacks{0};  ///< of commits that had succeeded
  std::atomic<PullMode> mode{PullMode::up_to_date};

 private:
  class Staged final : public StagedUpdate {
   public:
    Staged(RankReceiver& owner, std::unique_ptr<StagedUpdate> real) : owner_(owner), real_(std::move(real)) {}
    const PullReport& report() const override { return real_->report(); }
    Status commit(const CallOptions& call) override {
      const bool late = owner_.late_commits > 0;
      if (late) --owner_.late_commits;
      Status done = real_->commit(late ? CallOptions::within(std::chrono::milliseconds(-1)) : call);
      committed_ = done.ok();
      return done;
    }
    Status rollback() override {
      if (committed_) ++owner_.rollbacks;
      return real_->rollback();
    }

   private:
    RankReceiver& owner_;
    std::unique_ptr<StagedUpdate> real_;
    bool committed_ = false;
  };

  std::unique_ptr<Receiver> real_;
};

/// Tells the ledger; refuses nothing.
class RankEngine final : public Engine {
 public:
  RankEngine(std::uint32_t rank, const Share& share, Receiver& receiver, Ledger& ledger)
      : rank_(rank), share_(share), receiver_(receiver), ledger_(ledger) {}
  Status pause(Deadline /*at once*/) override {
    ledger_.stops(rank_, share_, share_.live(receiver_));
    return {};
  }
  Status resume(const Version& version, Deadline /*at once*/) override {
    ledger_.serves(rank_, version.id.number, share_, share_.live(receiver_));
    return {};
  }

 private:
  const std::uint32_t rank_;
  const Share& share_;
  Receiver& receiver_;
  Ledger& ledger_;
};

}  // namespace deltasync::commit
