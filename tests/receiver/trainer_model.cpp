#include "tests/receiver/trainer_model.hpp"
#include "format/tiling.hpp"

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
  mutate(now_.half, *model_.layout, density, seed_ * 1'000'003 + now_.state.version.id.number + 1);
  return name_next();
}

const Reference& TrainerModel::small_step(double density) {
  step_small(now_.half, *model_.layout, density, seed_ * 1'000'003 + now_.state.version.id.number + 1);
  return name_next();
}

const Reference& TrainerModel::name_next() {
  const std::uint64_t number = ++now_.state.version.id.number;
  now_.state.version.label = "step " + std::to_string(number);
  delta::half_digests(*model_.layout, now_.half, now_.state.digests, pool_);
  now_.state.root = delta::root_digest(now_.state.digests);
  return now_;
}

delta::Delta TrainerModel::encode(const Reference& before, const Reference& after, delta::ValueForm form) const {
  std::vector<std::uint64_t> digests = before.state.digests;
  const delta::EncodeRequest request{before.state.version.id, after.state.version.id, before.state.root, form};
  return delta::encode(*model_.layout, before.half, after.half, digests, request, pool_);
}

StagedStep TrainerModel::delta(const Reference& before, const Reference& after, delta::ValueForm form) const {
  return staged(encode(before, after, form));
}

StagedStep TrainerModel::delta_by_tile(const Reference& before, const Reference& after) const {
  const delta::Delta whole = encode(before, after, delta::ValueForm::ulp);
  StagedStep step{whole.from, whole.to, {}};
  for (const delta::Frame& frame : whole.frames) {
    for (std::uint64_t tile = 0; tile < model_.layout->tile_count(); ++tile) {
      const delta::Batch only{tile, tile + 1};
      delta::Frame cut = delta::cut_frame(frame, {&only, 1});
      if (!cut.bytes.empty()) step.frames.push_back(staged(std::move(cut.bytes)));
    }
  }
  return step;
}

StagedStep TrainerModel::compact_delta(const Reference& before, const Reference& after) const {
  const delta::Delta plain = encode(before, after, delta::ValueForm::ulp);
  auto compact = delta::compact(*model_.layout, plain, before.half, pool_);
  if (!compact) {
    std::fprintf(stderr, "compact: %s\n", compact.error().to_string().c_str());
    std::abort();
  }
  return staged(*std::move(compact));
}

StagedStep TrainerModel::staged(delta::Delta encoded) const {
  StagedStep step{encoded.from, encoded.to, {}};
  for (delta::Frame& frame : encoded.frames) step.frames.push_back(staged(std::move(frame.bytes)));
  return step;
}

StagedFrame TrainerModel::staged(std::vector<std::byte> bytes) const {
  StagedFrame frame;
  frame.bytes = std::move(bytes);
  auto records = delta::parse_frame(*model_.layout, frame.bytes);
  if (!records) {
    std::fprintf(stderr, "parse_frame: %s\n", records.error().to_string().c_str());
    std::abort();
  }
  frame.records = *std::move(records);
  return frame;
}

StagedStep TrainerModel::copy(const StagedStep& step) const {
  StagedStep copy{step.from, step.to, {}};
  for (const StagedFrame& frame : step.frames) copy.frames.push_back(staged(frame.bytes));
  return copy;
}

Status put_from_half(Target& target, const Reference& reference, const Tile& tile) {
  const Tensor& tensor = target.layout()->tensors()[tile.tensor];
  // Only read.
  auto* const half = const_cast<std::byte*>(reference.half.data());
  const delta::TensorMemory memory{half + tensor.offset, static_cast<std::size_t>(tensor.row_bytes())};
  return target.put_tile(tile, {delta::tile_address(memory, tile, tensor.element_bytes), memory.row_stride});
}

void fill_full(Target& target, const Reference& reference) {
  const Layout& layout = *target.layout();
  for (std::uint64_t i = 0; i < layout.tile_count(); ++i) {
    const Status put = put_from_half(target, reference, tile_of(layout, i));
    if (put.ok()) continue;
    std::fprintf(stderr, "put_tile: %s\n", put.error().to_string().c_str());
    std::abort();
  }
}

Status commit_whole(Target& target, const Reference& reference, FullUpdatePolicy policy) {
  DS_TRY(target.begin_full(policy, in_time()));
  fill_full(target, reference);
  return target.commit_full(reference.state, in_time());
}

std::vector<std::byte> read_live(const Target& target) {
  std::vector<std::byte> half(target.layout()->half_bytes());
  std::vector<std::byte> scratch;
  for (std::uint64_t i = 0; i < target.layout()->tile_count(); ++i) {
    const Tile tile = tile_of(*target.layout(), i);
    const Tensor& tensor = target.layout()->tensors()[tile.tensor];
    const TileRows rows = *target.live_tile(tile, scratch);
    for (std::uint64_t row = 0; row < tile.rect.rows; ++row) {
      std::memcpy(half.data() + tensor.offset + (tile.rect.row + row) * tensor.row_bytes() +
                      tile.rect.col * tensor.element_bytes,
                  rows.first + row * rows.row_stride, tile.rect.cols * tensor.element_bytes);
    }
  }
  return half;
}

}  // namespace deltasync::test
