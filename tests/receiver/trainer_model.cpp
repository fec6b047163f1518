#include "tests/receiver/trainer_model.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace deltasync::test {

TrainerModel::TrainerModel(std::uint64_t seed, std::vector<TensorSpec> specs)
    : model_(make_model(seed, std::move(specs))), seed_(seed) {
  now_.half = model_.half;
  now_.state.version = {{0x1a2b3c4d5e6f7788ull, 1}, "step 1"};
  now_.state.digests.resize(model_.layout->tile_count());
  delta::half_digests(*model_.layout, now_.half, now_.state.digests, pool_);
  now_.state.root = delta::root_digest(now_.state.digests);
}

const Reference& TrainerModel::step(double density) {
  const std::uint64_t number = ++now_.state.version.id.number;
  now_.state.version.label = "step " + std::to_string(number);
  mutate(now_.half, *model_.layout, density, seed_ * 1'000'003 + number);
  delta::half_digests(*model_.layout, now_.half, now_.state.digests, pool_);
  now_.state.root = delta::root_digest(now_.state.digests);
  return now_;
}

StagedStep TrainerModel::delta(const Reference& before, const Reference& after, delta::ValueForm form) const {
  std::vector<std::uint64_t> digests = before.state.digests;
  const delta::EncodeRequest request{before.state.version.id, after.state.version.id, before.state.root, form};
  delta::Delta encoded = delta::encode(*model_.layout, before.half, after.half, digests, request, pool_);
  StagedStep step{encoded.from, encoded.to, {}};
  for (delta::Frame& frame : encoded.frames) {
    StagedFrame staged;
    staged.bytes = std::move(frame.bytes);
    auto records = delta::parse_frame(*model_.layout, staged.bytes);
    if (!records) {
      std::fprintf(stderr, "parse_frame: %s\n", records.error().to_string().c_str());
      std::abort();
    }
    staged.records = *std::move(records);
    step.frames.push_back(std::move(staged));
  }
  return step;
}

void fill_full(Target& target, const Reference& reference) {
  const auto tensors = target.layout()->tensors();
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].bytes == 0) continue;
    std::memcpy(target.full_memory(i).base, reference.half.data() + tensors[i].offset, tensors[i].bytes);
  }
}

Status commit_whole(Target& target, const Reference& reference, FullOverLive policy) {
  DS_TRY(target.begin_full(policy, in_time()));
  fill_full(target, reference);
  return target.commit_full(reference.state);
}

std::vector<std::byte> read_live(const Target& target) {
  std::vector<std::byte> half(target.layout()->half_bytes());
  const auto tensors = target.layout()->tensors();
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    const delta::TensorMemory memory = target.live_memory(i);
    for (std::uint64_t row = 0; row < tensors[i].rows && tensors[i].bytes != 0; ++row) {
      std::memcpy(half.data() + tensors[i].offset + row * tensors[i].row_bytes(), memory.base + row * memory.row_stride,
                  tensors[i].row_bytes());
    }
  }
  return half;
}

}  // namespace deltasync::test
