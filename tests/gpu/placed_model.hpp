// A random placement twice: in the memory of a device, and in the host's, where HostExecutor says what is right.
#pragma once

#include <optional>

#include "format/tiling.hpp"
#include "placement/host_executor.hpp"
#include "placement/regions.hpp"
#include "tests/gpu/work.hpp"
#include "tests/placement/plan_fixture.hpp"

namespace deltasync::test {

/// Without the widest tensors: a device that is played on the host is slow.
inline std::vector<TensorSpec> small_specs() {
  std::vector<TensorSpec> specs = sample_specs();
  for (TensorSpec& spec : specs) {
    if (spec.name == "ffn.down") spec.shape = {300, 592}, spec.col_cuts = {200};
    if (spec.name == "wide.row") spec.shape = {2, 70000};
    if (spec.name == "embed.weight") spec.shape = {400, 96};
    if (spec.name == "attn.q") spec.shape = {100, 512}, spec.col_cuts = {128};
  }
  return specs;
}

/// As engines mostly keep their parameters: rows without gaps or, where `gaps`, with some, aligned to 16 bytes.
struct EnginePlan {
  Engine engine;
  PlacementPlan plan;

  static EnginePlan aligned(const Layout& layout, bool gaps) {
    EnginePlan made;
    for (const Tensor& t : layout.tensors()) {
      if (t.tile_count == 0) continue;
      const std::uint64_t stride = gaps ? (t.row_bytes() + 47) / 16 * 16 : t.row_bytes();
      made.plan.slices.push_back({t.spec.name,
                                  {0, 0, t.rows, t.cols},
                                  static_cast<std::uint32_t>(made.plan.memories.size()),
                                  0,
                                  stride,
                                  t.element_bytes});
      made.plan.memories.push_back(made.engine.add(t.spec.name, t.rows * stride));
    }
    return made;
  }
  static EnginePlan make(const Layout& layout, std::uint64_t seed) {
    if (seed % 3 == 0) return aligned(layout, seed % 2 == 0);
    RandomPlan random(layout, seed);
    return {std::move(random.engine), std::move(random.plan)};
  }
};

class PlacedModel {
 public:
  PlacedModel(gpu::Device& device, std::uint64_t seed)
      : model(make_model(seed, small_specs())), made(EnginePlan::make(*model.layout, seed)), device_(device) {
    PlacementPlan plan = made.plan;
    for (LiveMemory& memory : plan.memories) {
      live_.push_back(*device.allocate(memory.bytes));
      memory.base = live_.back().data();
      memory.device.ordinal = 0;
    }
    placement = *Placement::build(model.layout, plan);
    rest_ = *device.allocate(placement->rest_bytes());
    host.emplace(*placement::HostExecutor::make(*Placement::build(model.layout, made.plan)));
    Work work(device);
    for (const gpu::Memory& memory : live_) {
      work.to(memory.data(), std::vector<std::byte>(memory.bytes(), Engine::kUntouched));
    }
    work.to(rest_.data(), std::vector<std::byte>(rest_.bytes()));
  }

  const Layout& layout() const { return *model.layout; }
  const TileSet& tiles() const { return parts_of(*placement).tiles; }
  /// The table of the memories (by index) that `here` names; the rest is with memory 0.
  template <class Fn>
  placement::WordTables tables(const Fn& here) const {
    return placement::make_word_tables(*placement, [&](std::uint32_t memory) -> std::byte* {
      if (memory == kRestMemory) return here(0u) ? rest_.data() : nullptr;
      return here(memory) ? live_[memory].data() : nullptr;
    });
  }
  /// All tiles contiguous; what they take in all is `bytes`.
  std::vector<gpu::StagedTile> staged(std::uint64_t& bytes) const {
    std::vector<gpu::StagedTile> list;
    bytes = 0;
    for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
      const Tile tile = tile_of(layout(), tiles().nth(rank));
      list.push_back({rank, bytes, static_cast<std::uint32_t>(tile.rect.rows), 0});
      bytes += (host->tile_bytes(rank) + gpu::kUnitBytes - 1) / gpu::kUnitBytes * gpu::kUnitBytes;
    }
    return list;
  }
  /// A half's tiles where staged() has them.
  std::vector<std::byte> stage(const std::vector<std::byte>& half) const {
    std::uint64_t bytes = 0;
    const auto list = staged(bytes);
    std::vector<std::byte> area(bytes);
    for (const gpu::StagedTile& tile : list) {
      const auto from = tile_bytes(layout(), half, tiles().nth(tile.rank));
      std::copy(from.begin(), from.end(), area.begin() + static_cast<std::ptrdiff_t>(tile.at));
    }
    return area;
  }
  std::uint64_t largest_tile() const {
    std::uint64_t most = 0;
    for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) most = std::max(most, host->tile_bytes(rank));
    return most;
  }
  /// Live memory of the device is what the plan makes of the half.
  void expect_placed(const std::vector<std::byte>& half) {
    const auto placed = placed_contents(made.engine, layout(), made.plan, half);
    Work work(device_);
    for (std::size_t i = 0; i < live_.size(); ++i) {
      const auto bytes = work.down<std::byte>(live_[i].data(), live_[i].bytes());
      EXPECT_EQ(std::memcmp(bytes.data(), reinterpret_cast<const std::byte*>(placed[i].data()) + Engine::kGuardBytes,
                            bytes.size()),
                0)
          << "memory " << i;
    }
  }

  TestModel model;
  EnginePlan made;
  std::shared_ptr<const Placement> placement;   ///< on the device
  std::optional<placement::HostExecutor> host;  ///< of the same plan on the host

 private:
  gpu::Device& device_;
  std::vector<gpu::Memory> live_;
  gpu::Memory rest_;
};

}  // namespace deltasync::test
