// Full updates over slow links: when tiles are asked for packed, and what transfers tell of the link.
#include <algorithm>
#include <thread>

#include "base/trace.hpp"
#include "receiver/pull/pull.hpp"

namespace deltasync::receiver {
namespace {

/// What remains of a byte of weights when it is packed, from real ones (benchmarks.md "Parts").
double packed_share(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16: return 0.67;
    case Dtype::f32:
    case Dtype::f16: return 0.85;
    default: return 1;  // not known
  }
}

// Of one thread, the middle of what was measured and the least (benchmarks.md "Parts"). They choose the
// first portion only: that has to prove itself by the clock.
constexpr double kPackBytesPerS = 0.5e9;
constexpr double kUnpackBytesPerS = 1.5e9;  ///< with the digest

}  // namespace

bool Pull::far() const {
  return s_.control.welcome().clock != trace::clock_id();
}

/// More and more each time, and only where the most comes after it: connections that begin slowly have grown by then.
Result<Pull::Progress> Pull::probe_link(const wire::PlanReply& reply, Ranges& rest) {
  std::uint64_t bytes = std::max<std::uint64_t>(1, s_.peer.tuning.probe_bytes);
  while (far() && reply.pack_threads != 0 && s_.link.wants_sample() && bytes_of_tiles(s_.layout, rest) >= 4 * bytes) {
    DS_ASSIGN(const Progress progress, fetch_plain(reply, take_front(s_.layout, rest, bytes)));
    if (progress == Progress::replan) return progress;
    bytes *= 2;
  }
  return Progress::whole;
}

bool Pull::packing_pays(const wire::PlanReply& reply, const Ranges& ranges) const {
  if (plain_tiles_only_ || reply.pack_threads == 0 || !s_.link.rate().known()) return false;
  TwoForms forms;
  double smaller = 0;
  for (const wire::TileRange& range : ranges) {
    for (std::uint64_t first = range.first; first < range.end;) {
      const Tensor& tensor = s_.layout.tensors()[s_.layout.tensor_of_tile(first)];
      const std::uint64_t end = std::min(range.end, tensor.first_tile + tensor.tile_count);
      const std::uint64_t bytes = bytes_of_tiles(s_.layout, {{first, end}});
      forms.plain_bytes += bytes;
      smaller += packed_share(tensor.spec.dtype) * static_cast<double>(bytes);
      first = end;
    }
  }
  forms.smaller_bytes = static_cast<std::uint64_t>(smaller);
  const auto plain = static_cast<double>(forms.plain_bytes);
  const unsigned unpacking = std::min(s_.streams.count(), std::max(1u, std::thread::hardware_concurrency()));
  forms.beside_s = std::max(plain / (kPackBytesPerS * reply.pack_threads), plain / (kUnpackBytesPerS * unpacking));
  return smaller_pays(forms, s_.link.rate());
}

/// One request has several frames, since the agent packs ahead within a request only. The streams' own threads unpack:
/// there are several, and they would wait for the link else.
Result<Pull::Progress> Pull::fetch_packed(const wire::PlanReply& reply, const Ranges& ranges) {
  stage_ = "fetching packed tiles of " + to_string(reply.target);
  out_.report.packed = true;
  const std::uint64_t items = bytes_of_tiles(s_.layout, ranges) / s_.peer.tuning.packed_item_bytes;
  return fetch_raw(reply, ranges, std::max<std::uint64_t>(items, s_.streams.count()), FrameFetch::Kind::packed_tiles);
}

void Pull::learn(const FetchRoundResult& round, bool packed) {
  const bool smooth = round.end == FetchRoundEnd::complete && round.stream_restarts == 0;
  if (packed && round.stream_restarts != 0) plain_tiles_only_ = true;
  // Loopback is no link, and a round with breaks in it says more about them.
  if (!smooth || !far()) return;
  if (packed) {
    s_.link.at_least(round.bytes, round.waited_s);
  } else {
    s_.link.add(round.bytes, round.waited_s);
  }
}

}  // namespace deltasync::receiver
