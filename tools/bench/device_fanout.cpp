#include "bench/device_fanout.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "base/deadline.hpp"
#include "bench/device_limits.hpp"
#include "delta/mix.hpp"
#include "gpu/cuda_device.hpp"
#include "gpu/fake_device.hpp"
#include "gpu/nccl.hpp"
#include "placement/words.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kShift = 256;  ///< from a piece to the next, so that each has other bytes
constexpr std::size_t kRing = 2;       ///< pieces under way: one comes from the host while the other is broadcast

struct FanoutAmount {
  std::uint64_t piece_bytes;
  unsigned pieces;
};
constexpr FanoutAmount kFanoutReal{std::uint64_t{64} << 20, 32};
constexpr FanoutAmount kFanoutFake{std::uint64_t{1} << 20, 4};
std::uint64_t host_bytes(const FanoutAmount& amount) {
  return amount.piece_bytes + amount.pieces * kShift;
}

/// One device's part of it.
struct Endpoint {
  std::unique_ptr<gpu::Device> device;
  std::unique_ptr<gpu::Stream> in;
  std::unique_ptr<gpu::Stream> out;  ///< of the broadcast
  std::array<gpu::Memory, kRing> ring;
  std::array<std::unique_ptr<gpu::Event>, kRing> filled;
  std::array<std::unique_ptr<gpu::Event>, kRing> sent;
  std::unique_ptr<gpu::Event> end;
  gpu::Memory piece;  ///< what comes to it, piece n from n * kShift on; the same for all
  gpu::Memory host;   ///< to look at what came

  static Result<Endpoint> make(std::unique_ptr<gpu::Device> device, const FanoutAmount& amount) {
    Endpoint endpoint;
    endpoint.device = std::move(device);
    DS_ASSIGN(endpoint.in, endpoint.device->make_stream());
    DS_ASSIGN(endpoint.out, endpoint.device->make_stream());
    DS_ASSIGN(endpoint.end, endpoint.device->make_event());
    DS_ASSIGN(endpoint.piece, endpoint.device->pin(host_bytes(amount)));
    DS_ASSIGN(endpoint.host, endpoint.device->pin(amount.piece_bytes));
    for (std::uint64_t at = 0; at < endpoint.piece.bytes(); at += sizeof(std::uint64_t)) {
      placement::store_element(endpoint.piece.data() + at, delta::mix(at + 1));
    }
    for (std::size_t i = 0; i < kRing; ++i) {
      DS_ASSIGN(endpoint.ring[i], endpoint.device->allocate(amount.piece_bytes));
      DS_ASSIGN(endpoint.filled[i], endpoint.device->make_event());
      DS_ASSIGN(endpoint.sent[i], endpoint.device->make_event());
    }
    return endpoint;
  }
};
using Endpoints = std::vector<Endpoint>;

/// Of the tests' devices, through the host: each copy ends before the next begins.
class FakeBroadcast final : public gpu::Broadcast {
 public:
  explicit FakeBroadcast(Endpoints& endpoints) : endpoints_(&endpoints) {}
  Status run(std::span<std::byte* const> memories, std::uint64_t bytes,
             std::span<gpu::Stream* const> streams) override {
    Endpoint& first = endpoints_->front();
    DS_TRY(streams[0]->copy_out(first.host.data(), memories[0], bytes));
    DS_TRY(streams[0]->record(*first.end));
    DS_TRY(gpu::wait(*first.end, Deadline::after(kDeviceLimit), "a piece on its way"));
    for (std::size_t i = 1; i < endpoints_->size(); ++i) {
      Endpoint& endpoint = (*endpoints_)[i];
      std::memcpy(endpoint.host.data(), first.host.data(), static_cast<std::size_t>(bytes));
      DS_TRY(streams[i]->copy_in(memories[i], endpoint.host.data(), bytes));
      DS_TRY(streams[i]->record(*endpoint.end));
      DS_TRY(gpu::wait(*endpoint.end, Deadline::after(kDeviceLimit), "a piece on its way"));
    }
    return {};
  }

 private:
  Endpoints* endpoints_;
};

Status wait_for_all(const Endpoints& endpoints, std::unique_ptr<gpu::Stream> Endpoint::*stream) {
  for (const Endpoint& endpoint : endpoints) DS_TRY((endpoint.*stream)->record(*endpoint.end));
  for (const Endpoint& endpoint : endpoints)
    DS_TRY(gpu::wait(*endpoint.end, Deadline::after(kDeviceLimit), "a benchmark's copies"));
  return {};
}

/// Each from pinned memory of its own, as ranks have them that pull beside each other.
Status copy_to_each(const Endpoints& endpoints, const FanoutAmount& amount) {
  for (unsigned n = 0; n < amount.pieces; ++n) {
    for (const Endpoint& endpoint : endpoints) {
      DS_TRY(endpoint.in->copy_in(endpoint.ring[n % kRing].data(), endpoint.piece.data() + n * kShift,
                                  amount.piece_bytes));
    }
  }
  return wait_for_all(endpoints, &Endpoint::in);
}

/// To the first one, and from there to all.
Status copy_and_broadcast(const Endpoints& endpoints, gpu::Broadcast& broadcast, const FanoutAmount& amount) {
  const Endpoint& first = endpoints.front();
  std::vector<std::byte*> memories(endpoints.size());
  std::vector<gpu::Stream*> streams;
  streams.reserve(endpoints.size());
  for (const Endpoint& endpoint : endpoints) streams.push_back(endpoint.out.get());
  for (unsigned n = 0; n < amount.pieces; ++n) {
    const std::size_t i = n % kRing;
    if (n >= kRing) DS_TRY(first.in->wait_for(*first.sent[i]));
    DS_TRY(first.in->copy_in(first.ring[i].data(), first.piece.data() + n * kShift, amount.piece_bytes));
    DS_TRY(first.in->record(*first.filled[i]));
    DS_TRY(first.out->wait_for(*first.filled[i]));
    std::transform(endpoints.begin(), endpoints.end(), memories.begin(),
                   [i](const Endpoint& endpoint) { return endpoint.ring[i].data(); });
    DS_TRY(broadcast.run(memories, amount.piece_bytes, streams));
    DS_TRY(first.out->record(*first.sent[i]));
  }
  return wait_for_all(endpoints, &Endpoint::out);
}

/// That the ring of every device has the last pieces, which are then taken away again.
Status check_all(const Endpoints& endpoints, const FanoutAmount& amount) {
  for (const Endpoint& endpoint : endpoints) {
    for (unsigned n = amount.pieces - kRing; n < amount.pieces; ++n) {
      const gpu::Memory& memory = endpoint.ring[n % kRing];
      DS_TRY(endpoint.in->copy_out(endpoint.host.data(), memory.data(), amount.piece_bytes));
      DS_TRY(endpoint.in->zero(memory.data(), amount.piece_bytes));
      DS_TRY(endpoint.in->record(*endpoint.end));
      DS_TRY(gpu::wait(*endpoint.end, Deadline::after(kDeviceLimit), "reading back"));
      if (std::memcmp(endpoint.host.data(), endpoint.piece.data() + n * kShift,
                      static_cast<std::size_t>(amount.piece_bytes)) == 0)
        continue;
      return Error(Errc::corrupt, endpoint.device->name() + " did not get what was sent to all devices");
    }
  }
  return {};
}

Result<Endpoints> open_endpoints(const Options& options, const FanoutAmount& amount) {
  Endpoints endpoints;
  std::int32_t count = 2;  // fake ones
  if (!options.fake_device) {
    DS_ASSIGN(count, gpu::cuda_device_count());
  }
  for (std::int32_t i = 0; i < count && count > 1; ++i) {
    std::unique_ptr<gpu::Device> device;
    if (options.fake_device) {
      gpu::FakeDevice::Options fake;
      fake.seed = options.seed + static_cast<std::uint64_t>(i);
      fake.ordinal = i;
      device = std::make_unique<gpu::FakeDevice>(fake);
    } else {
      DS_ASSIGN(device, gpu::open_cuda_device(i, gpu::Use::copies));
    }
    DS_ASSIGN(Endpoint endpoint, Endpoint::make(std::move(device), amount));
    endpoints.push_back(std::move(endpoint));
  }
  return endpoints;
}

Result<std::unique_ptr<gpu::Broadcast>> open_broadcast(const Options& options, Endpoints& endpoints) {
  if (options.fake_device) return std::unique_ptr<gpu::Broadcast>(std::make_unique<FakeBroadcast>(endpoints));
  std::vector<std::int32_t> ordinals;
  for (std::size_t i = 0; i < endpoints.size(); ++i) ordinals.push_back(static_cast<std::int32_t>(i));
  return gpu::open_nccl_broadcast(ordinals);
}

}  // namespace

Result<std::optional<Fanout>> measure_fanout(const Options& options, unsigned rounds) {
  const FanoutAmount& amount = options.fake_device ? kFanoutFake : kFanoutReal;
  DS_ASSIGN(Endpoints endpoints, open_endpoints(options, amount));
  if (endpoints.empty()) return std::optional<Fanout>();
  Fanout best;
  best.devices = endpoints.size();
  auto broadcast = open_broadcast(options, endpoints);
  if (!broadcast.ok()) best.no_nccl = broadcast.error().to_string();
  const std::uint64_t bytes = amount.pieces * amount.piece_bytes * endpoints.size();
  for (unsigned round = 0; round <= rounds; ++round) {  // the first one is not timed: what is made when it is needed
    const Stopwatch copies;
    DS_TRY(copy_to_each(endpoints, amount));
    if (round != 0) best.h2d_gbps = std::max(best.h2d_gbps, gbps(bytes, copies.seconds()));
    DS_TRY(check_all(endpoints, amount));
    if (!best.no_nccl.empty()) continue;
    const Stopwatch broadcasts;
    // Devices are connected by the first one, which may not go.
    if (const Status sent = copy_and_broadcast(endpoints, **broadcast, amount); !sent.ok()) {
      best.no_nccl = sent.error().to_string();
      best.nccl_gbps = 0;
      broadcast->reset();
      DS_TRY(wait_for_all(endpoints, &Endpoint::out));
      continue;
    }
    if (round != 0) best.nccl_gbps = std::max(best.nccl_gbps, gbps(bytes, broadcasts.seconds()));
    DS_TRY(check_all(endpoints, amount));
  }
  return std::optional<Fanout>(best);
}

}  // namespace deltasync::bench
