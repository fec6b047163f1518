// What the fake agent answers, and how it misbehaves there.
#include <algorithm>
#include <thread>
#include <utility>

#include "base/deadline.hpp"
#include "base/hash.hpp"
#include "deltasync/layout.hpp"
#include "format/packed_layout.hpp"
#include "format/tiling.hpp"
#include "format/wire_report.hpp"
#include "net/auth.hpp"
#include "tests/receiver/fake_agent.hpp"

namespace deltasync::test {
namespace {

constexpr std::size_t kSendPiece = 64u << 10;

}  // namespace

Status FakeAgent::answer(Peer& peer, const net::Message& message) {
  const std::uint64_t request = message.header.request;
  if (has_no_answer(message.type())) {
    if (message.type() == wire::Type::report) DS_TRY(wire::Report::decode(message.payload));
    if (message.type() == wire::Type::keep_alive) {
      DS_ASSIGN(const wire::KeepAlive asked, wire::KeepAlive::decode(message.payload));
      peer.alive_every = std::chrono::milliseconds(asked.every_ms);
    }
    return {};
  }
  Request seen;
  seen.type = message.type();
  if (seen.type == wire::Type::get_extent) {
    DS_ASSIGN(const wire::GetExtent e, wire::GetExtent::decode(message.payload));
    seen.tiles = e.tiles;
  }
  if (seen.type == wire::Type::get_raw_tiles) {
    DS_ASSIGN(const wire::GetRawTiles r, wire::GetRawTiles::decode(message.payload));
    if (!r.ranges.empty()) seen.tiles = {r.ranges.front().first, r.ranges.back().end};
  }
  const Fault fault = ask_hook(seen);
  if (fault == Fault::drop) return Error(Errc::aborted, "");
  if (fault == Fault::stall) {
    while (!stop_ && !peer.socket.peer_closed()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return Error(Errc::aborted, "");
  }
  if (fault == Fault::refuse) return send_error(peer, request, Errc::internal, "told to refuse");
  if (fault == Fault::chatter) {
    const wire::Header word = wire::make_header(wire::Type::alive, request, {});
    std::vector<std::byte> words;
    for (int i = 0; i < 4096; ++i) words.insert(words.end(), bytes_of(word).begin(), bytes_of(word).end());
    while (!stop_) DS_TRY(send_bytes(peer, words));
    return Error(Errc::aborted, "");
  }
  if (fault == Fault::garbage) {
    std::vector<std::byte> noise(4096, std::byte{0x5A});
    return send_bytes(peer, noise);
  }
  if (fault == Fault::lie_huge || fault == Fault::lie_many || fault == Fault::bad_header) {
    wire::Header header = wire::make_header(wire::Type::frame, request, {});
    if (fault == Fault::lie_many) header.payload_bytes = wire::kFrameBytesMax;
    if (fault == Fault::lie_huge) header.payload_bytes = std::uint64_t{1} << 60;
    header.header_hash = xxh3_64(bytes_of(header).first(offsetof(wire::Header, header_hash)));
    if (fault == Fault::bad_header) header.header_hash ^= 1;
    return send_bytes(peer, bytes_of(header));
  }
  switch (message.type()) {
    case wire::Type::get_layout: {
      LayoutPtr layout;
      std::optional<Sidecar> sidecar;
      {
        const std::lock_guard lock(mutex_);
        layout = layout_;
        sidecar = sidecar_;
      }
      if (!layout) return send_error(peer, request, Errc::not_found, "no layout yet");
      auto encoded = layout->encode();
      if (fault == Fault::flip_at_source) encoded[0] ^= std::byte{1};
      DS_ASSIGN(const auto packed, wire::pack_layout(encoded, (sidecar ? *sidecar : make_sidecar(*layout)).encode()));
      if (fault != Fault::flip_in_transit) return peer.socket.send(request, packed, soon());
      auto payload = packed.encode();
      const wire::Header header = wire::make_header(wire::Type::layout, request, payload);
      payload[0] ^= std::byte{1};
      DS_TRY(send_bytes(peer, bytes_of(header)));
      return send_bytes(peer, payload);
    }
    case wire::Type::subscribe: return answer_subscribe(peer, message);
    case wire::Type::plan: return answer_plan(peer, message);
    case wire::Type::get_digests: {
      DS_ASSIGN(const wire::GetDigests get, wire::GetDigests::decode(message.payload));
      const auto plan = find_plan(get.plan);
      if (!plan) return send_error(peer, request, Errc::not_found, "no such plan");
      std::vector<std::uint64_t> digests = plan->tiles.gather(*plan->target.digests);
      if (fault == Fault::lie_long) digests.push_back(1);
      if (fault == Fault::flip_at_source) digests[0] ^= 1;
      const auto* bytes = reinterpret_cast<const std::byte*>(digests.data());
      return peer.socket.send(wire::Type::digests, request, {bytes, digests.size() * 8}, soon());
    }
    case wire::Type::get_extent: return answer_extent(peer, message, fault);
    case wire::Type::get_frames: return answer_frames(peer, message, fault);
    case wire::Type::get_raw_tiles: return answer_raw(peer, message, fault);
    case wire::Type::check_tiles: {
      DS_TRY(wire::CheckTiles::decode(message.payload));
      return peer.socket.send(request, wire::TilesChecked(), soon());  // whatever it says: all is valid here
    }
    case wire::Type::get_lag: {
      wire::Lag lag;
      {
        const std::lock_guard lock(mutex_);
        lag.newest = versions_.back().version;
        const std::chrono::nanoseconds age = std::chrono::steady_clock::now() - versions_.back().published_at;
        lag.newest_age_ns = static_cast<std::uint64_t>(age.count());
      }
      return peer.socket.send(request, lag, soon());
    }
    case wire::Type::relay_to: return peer.socket.send(request, wire::Parents(), soon());
    case wire::Type::release: {
      DS_ASSIGN(const wire::Release release, wire::Release::decode(message.payload));
      {
        const std::lock_guard lock(mutex_);
        plans_.erase(release.plan);
      }
      return peer.socket.send(wire::Type::end, request, {}, soon());
    }
    default: return send_error(peer, request, Errc::protocol, "unknown request");
  }
}

const FakeAgent::State* FakeAgent::state_of(const VersionId& id) const {
  const auto found =
      std::find_if(versions_.begin(), versions_.end(), [&](const State& v) { return v.version.id == id; });
  return found == versions_.end() ? nullptr : &*found;
}

std::vector<delta::DeltaPtr> FakeAgent::chain(const TileSet& tiles, const VersionId& from, const Digest128& root,
                                              const VersionId& to) const {
  std::vector<delta::DeltaPtr> steps;
  for (const auto& d : ring_) {
    if (steps.empty() && (d->from != from || tiles.root(*state_of(from)->digests) != root)) continue;
    steps.push_back(d);
    if (d->to == to) return steps;
  }
  return {};
}

wire::DeltaStep FakeAgent::describe(const TileSet& tiles, const delta::Delta& d) const {
  wire::DeltaStep step{d.from, d.to, tiles.root(*state_of(d.to)->digests), 0, 0, 0};
  std::vector<delta::Batch> wanted;
  for (const wire::TileRange& r : tiles.ranges()) wanted.push_back({r.first, r.end});
  for (const delta::Frame& frame : d.frames) {
    const delta::Frame cut = delta::cut_frame(frame, wanted);
    if (cut.bytes.empty()) continue;
    ++step.frames;
    step.frame_bytes += cut.bytes.size();
    step.changed += cut.changed;
  }
  if (setup_.hides_changes) step.changed = 1;
  return step;
}

delta::DeltaPtr FakeAgent::compacted(const delta::Delta& d) const {
  ThreadPool pool(1, "fake-compact");
  return std::make_shared<const delta::Delta>(delta::compact(*layout_, d, *state_of(d.from)->half, pool).value());
}

Status FakeAgent::answer_subscribe(Peer& peer, const net::Message& message) {
  DS_ASSIGN(const wire::Subscribe wanted, wire::Subscribe::decode(message.payload));
  LayoutPtr layout;
  {
    const std::lock_guard lock(mutex_);
    layout = layout_;
  }
  if (wanted.layout != layout->digest()) {
    return send_error(peer, message.header.request, Errc::layout_mismatch, "another layout");
  }
  DS_ASSIGN(peer.subscription, TileSet::make(*layout, wanted.ranges));
  return peer.socket.send(wire::Type::end, message.header.request, {}, soon());
}

Status FakeAgent::answer_plan(Peer& peer, const net::Message& message) {
  DS_ASSIGN(const wire::PlanRequest plan, wire::PlanRequest::decode(message.payload));
  {
    const std::lock_guard lock(mutex_);
    plans_seen_.push_back(plan);
  }
  if (plan.subscription != Digest128() && (!peer.subscription || peer.subscription->digest() != plan.subscription)) {
    return send_error(peer, message.header.request, Errc::invalid_argument, "nobody subscribed to that here");
  }
  const Deadline patience = Deadline::after(std::chrono::milliseconds(plan.wait_ms));
  Deadline alive = Deadline::after(peer.alive_every);
  for (;;) {
    if (peer.alive_every.count() != 0 && alive.passed()) {
      DS_TRY(peer.socket.send(wire::Type::alive, message.header.request, {}, soon()));
      alive = Deadline::after(peer.alive_every);
    }
    {
      std::unique_lock lock(mutex_);
      if (plan.layout != layout_->digest()) {
        lock.unlock();
        return send_error(peer, message.header.request, Errc::layout_mismatch, "another layout");
      }
      const TileSet tiles = plan.subscription == Digest128() ? TileSet::whole(*layout_) : *peer.subscription;
      const std::uint64_t full_bytes = tiles.is_whole() ? layout_->half_bytes() : tiles.bytes();
      const State* target = nullptr;
      bool gone = false;
      for (const State& v : versions_) {
        const bool last = &v == &versions_.back();
        switch (plan.want) {
          case wire::WantKind::newest:
            if (last) target = &v;
            break;
          case wire::WantKind::newer:
            if (last && v.version.id != plan.base) target = &v;
            break;
          case wire::WantKind::number:
            if (plan.epoch != 0 && v.version.id.epoch != plan.epoch) break;
            if (v.version.id.number == plan.number) target = &v;
            break;
          case wire::WantKind::label:
            if (v.version.label == plan.label) target = &v;
            break;
        }
      }
      wire::PlanReply reply;
      if (target != nullptr) {
        reply.target = target->version;
        reply.target_root = tiles.root(*target->digests);
        reply.full_bytes = full_bytes;
        reply.pack_threads = setup_.pack_threads;
        auto live = std::make_shared<LivePlan>();
        live->target = *target;
        live->tiles = tiles;
        live->owner = peer.id;
        live->steps = chain(tiles, plan.base, plan.base_root, target->version.id);
        if (setup_.compact && plan.compact != 0) {
          for (auto& d : live->steps) d = compacted(*d);
        }
        std::uint64_t frame_bytes = 0;
        for (const auto& d : live->steps) frame_bytes += describe(tiles, *d).frame_bytes;
        const bool pays = frame_bytes < full_bytes || target != &versions_.back();
        if (!pays && !setup_.large_deltas) live->steps.clear();
        const bool same = plan.base == target->version.id && plan.base_root == reply.target_root;
        if (same && plan.partial == 0 && plan.full_only == 0) {
          reply.mode = wire::PlanMode::up_to_date;
        } else if (!live->steps.empty() && plan.partial == 0 && plan.full_only == 0) {
          reply.mode = wire::PlanMode::delta;
        } else {
          reply.mode = wire::PlanMode::full;
          reply.arriving = setup_.arriving && plan.arriving != 0 ? 1 : 0;
          gone = target != &versions_.back();
          if (plan.partial == 0) live->steps.clear();
        }
        if (reply.mode != wire::PlanMode::up_to_date && !gone) {
          for (const auto& d : live->steps) reply.steps.push_back(describe(tiles, *d));
          reply.plan = net::make_random_id();
          plans_[reply.plan] = std::move(live);
        }
        lock.unlock();
        if (gone) return send_error(peer, message.header.request, Errc::gone, "that version is gone");
        return peer.socket.send(message.header.request, reply, soon());
      }
    }
    if (stop_ || patience.passed()) {
      return send_error(peer, message.header.request, Errc::timed_out, "no such version came");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::shared_ptr<FakeAgent::LivePlan> FakeAgent::find_plan(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto it = plans_.find(id);
  return it == plans_.end() ? nullptr : it->second;
}

void FakeAgent::wait_while_revoking(const LivePlan& plan) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (plan.revoked || !plan.revoking || stop_) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Status FakeAgent::answer_extent(Peer& peer, const net::Message& message, Fault fault) {
  DS_ASSIGN(const wire::GetExtent get, wire::GetExtent::decode(message.payload));
  const std::uint64_t request = message.header.request;
  const auto plan = find_plan(get.plan);
  if (!plan) return send_error(peer, request, Errc::not_found, "no such plan");
  {
    const std::lock_guard lock(mutex_);
    extents_asked_.push_back(get.tiles);
  }
  const Tile first = tile_of(*layout_, get.tiles.first);
  const Tile last = tile_of(*layout_, get.tiles.end - 1);
  const Tensor& t0 = layout_->tensors()[first.tensor];
  const Tensor& t1 = layout_->tensors()[last.tensor];
  if (first.rect.col != 0 || last.rect.col + last.rect.cols != t1.cols) {
    return send_error(peer, request, Errc::protocol, "not whole bands");
  }
  const std::uint64_t begin = t0.offset + first.rect.row * t0.row_bytes();
  const std::uint64_t end = t1.offset + (last.rect.row + last.rect.rows) * t1.row_bytes();
  bool revoked = false;
  {
    const std::lock_guard lock(mutex_);
    revoked = plan->revoked;
  }
  if (revoked) return send_error(peer, request, Errc::lease_revoked, "the writer needs the half");
  const std::uint64_t claimed = end - begin + (fault == Fault::lie_long ? 64 : 0);
  DS_TRY(send_bytes(peer, bytes_of(wire::make_header(wire::Type::extent, request, {}, claimed))));
  std::vector<std::byte> piece;
  for (std::uint64_t at = begin; at < end;) {
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(kSendPiece, end - at));
    std::shared_ptr<const std::vector<std::byte>> source = plan->target.half;
    std::function<void()> hook;
    {
      const std::lock_guard lock(mutex_);
      plan->sent += n;
      if (revoke_after_ != 0 && plan->sent > revoke_after_ && !plan->revoking) {
        plan->revoking = true;
        hook = on_revoke_;
        if (!hook) plan->revoked = true;
      }
    }
    if (hook) hook();  // as with an agent, the newer version is there before the lease of the older one ends
    {
      const std::lock_guard lock(mutex_);
      if (hook) plan->revoked = true;
    }
    wait_while_revoking(*plan);
    {
      const std::lock_guard lock(mutex_);
      if (plan->revoked) source = versions_.back().half;  // the writer is over it
    }
    piece.assign(source->begin() + static_cast<std::ptrdiff_t>(at),
                 source->begin() + static_cast<std::ptrdiff_t>(at + n));
    if (at == begin && (fault == Fault::flip_at_source || fault == Fault::flip_in_transit)) piece[0] ^= std::byte{4};
    if (fault == Fault::drop_midway && at + n >= begin + (end - begin) / 2) return hang_up(peer);
    DS_TRY(send_bytes(peer, piece));
    extent_bytes_ += n;
    at += n;
  }
  {
    const std::lock_guard lock(mutex_);
    revoked = plan->revoked;
  }
  if (revoked) return send_error(peer, request, Errc::lease_revoked, "the writer needs the half");
  return peer.socket.send(wire::Type::end, request, {}, soon());
}

Status FakeAgent::send_frame(Peer& peer, std::uint64_t request, std::vector<std::byte> bytes, Fault fault) {
  const wire::Header header = wire::make_header(wire::Type::frame, request, bytes);
  DS_TRY(send_bytes(peer, bytes_of(header)));
  if (fault == Fault::drop_midway) {
    DS_TRY(send_bytes(peer, ByteSpan(bytes).first(bytes.size() / 2)));
    return hang_up(peer);
  }
  if (fault == Fault::flip_in_transit) bytes[bytes.size() / 2] ^= std::byte{16};
  return send_bytes(peer, bytes);
}

Status FakeAgent::answer_frames(Peer& peer, const net::Message& message, Fault fault) {
  DS_ASSIGN(const wire::GetFrames get, wire::GetFrames::decode(message.payload));
  const std::uint64_t request = message.header.request;
  const auto plan = find_plan(get.plan);
  if (!plan || get.step >= plan->steps.size()) return send_error(peer, request, Errc::not_found, "no such plan");
  std::vector<delta::Batch> wanted;
  for (const auto& r : plan->tiles.intersect(get.ranges)) wanted.push_back({r.first, r.end});
  if (fault == Fault::wrong_tiles) wanted = {{0, layout_->tile_count()}};
  for (const delta::Frame& frame : plan->steps[get.step]->frames) {
    delta::Frame cut = delta::cut_frame(frame, wanted);
    if (cut.bytes.empty()) continue;
    if (fault == Fault::exponent_classes) {
      const std::vector<std::byte> base = half_of(plan->steps[get.step]->from);
      DS_ASSIGN(cut, delta::compact_frame(*layout_, cut, base));
    }
    if (fault == Fault::flip_at_source) {
      cut.bytes[cut.bytes.size() - 1] ^= std::byte{1};  // inside the frame; the message's own hash fits it
      fault = Fault::none;
    }
    DS_TRY(send_frame(peer, request, cut.bytes, fault));
    if (fault == Fault::wrong_tiles) DS_TRY(send_frame(peer, request, cut.bytes, fault));
  }
  return peer.socket.send(wire::Type::end, request, {}, soon());
}

Status FakeAgent::answer_raw(Peer& peer, const net::Message& message, Fault fault) {
  DS_ASSIGN(const wire::GetRawTiles get, wire::GetRawTiles::decode(message.payload));
  const std::uint64_t request = message.header.request;
  const auto plan = find_plan(get.plan);
  if (!plan) return send_error(peer, request, Errc::not_found, "no such plan");
  {
    const std::unique_lock lock(mutex_);
    if (plan->revoked) fault = Fault::refuse;
  }
  if (fault == Fault::refuse) return send_error(peer, request, Errc::lease_revoked, "the writer needs the half");
  std::vector<std::byte> half = *plan->target.half;
  const std::vector<wire::TileRange> wanted = plan->tiles.intersect(get.ranges);
  if (fault == Fault::wrong_tiles) {
    std::uint64_t other = 0;  // the first tile that is not asked for
    for (const auto& r : wanted) other = r.first <= other ? std::max(other, r.end) : other;
    if (other < layout_->tile_count()) {
      delta::Frame frame = delta::raw_frame(*layout_, half, std::span(&other, 1), *plan->target.digests);
      DS_TRY(send_frame(peer, request, std::move(frame.bytes), fault));
    }
  }
  for (const auto& r : wanted) {
    std::vector<std::uint64_t> tiles;
    for (std::uint64_t t = r.first; t < r.end; ++t) tiles.push_back(t);
    if (fault == Fault::flip_at_source) {
      const Tile tile = tile_of(*layout_, r.first);
      const Tensor& tensor = layout_->tensors()[tile.tensor];
      half[tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes] ^= std::byte{8};
    }
    const bool pack = get.form == wire::RawForm::packed || fault == Fault::unasked_planes;
    delta::Frame frame = pack ? delta::packed_frame(*layout_, half, tiles, *plan->target.digests)
                              : delta::raw_frame(*layout_, half, tiles, *plan->target.digests);
    DS_TRY(send_frame(peer, request, std::move(frame.bytes), fault));
  }
  return peer.socket.send(wire::Type::end, request, {}, soon());
}

}  // namespace deltasync::test
