#include "bench/halves.hpp"

#include <unistd.h>

namespace deltasync::bench {

Result<Halves> Halves::make(const Options& options, ThreadPool& pool) {
  Halves halves;
  DS_ASSIGN(halves.layout_, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30),
                                           options.master ? Dtype::f32 : Dtype::bf16));
  const shm::SegmentPath path{options.shm_dir, "deltasync-bench-" + std::to_string(::getpid())};
  const Layout& layout = *halves.layout_;
  const shm::Segment::Geometry geometry{layout.half_bytes(), delta::make_batches(layout).size(), layout.digest()};
  DS_ASSIGN(halves.segment_, shm::Segment::create(path, 1, geometry, halves.layout_->encode(), {}));
  DS_TRY(shm::Segment::unlink(path));
  SyntheticModel model(halves.layout_, options.density, options.seed, pool);
  model.write_half(halves.segment_->half(0));
  model.step();
  model.write_half(halves.segment_->half(1));
  halves.digests_.resize(halves.layout_->tile_count());
  delta::half_digests(*halves.layout_, halves.before(), halves.digests_, pool);
  return halves;
}

delta::Delta Halves::encode(std::vector<std::uint64_t>& digests, ThreadPool& pool, delta::ValueForm form) const {
  const delta::EncodeRequest request{{1, 1}, {1, 2}, delta::root_digest(digests), form};
  return delta::encode(*layout_, before(), after(), digests, request, pool);
}

TargetState state_of(std::uint64_t number, std::vector<std::uint64_t> digests) {
  const Digest128 root = delta::root_digest(digests);
  return {{{1, number}, "bench"}, root, std::move(digests)};
}

}  // namespace deltasync::bench
