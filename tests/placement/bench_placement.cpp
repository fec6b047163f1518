// What plans of very many slices cost: to check, to bind, and to exchange a delta's changes with. Prints seconds; run
// it by hand.
//
//   bench_placement [slices]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format/tiling.hpp"
#include "placement/host_executor.hpp"
#include "placement/regions.hpp"

namespace deltasync {
namespace {

using placement::HostExecutor;

double timed(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Case {
  std::string name;
  std::vector<TensorSpec> specs;
  PlacementPlan plan;
  std::vector<std::vector<std::uint64_t>> memories;

  std::uint32_t memory(std::uint64_t bytes) {
    memories.emplace_back(bytes / 8 + 1);
    const std::string name_of = "memory." + std::to_string(memories.size() - 1);
    plan.memories.push_back({name_of, reinterpret_cast<std::byte*>(memories.back().data()), bytes, {}, {}});
    return static_cast<std::uint32_t>(memories.size() - 1);
  }
};

/// One tensor, each row somewhere else.
Case rows(std::uint64_t n) {
  Case c{"rows in reverse order", {{"a", Dtype::bf16, {n, 256}, {}, {}}}, {}, {}};
  const std::uint32_t m = c.memory(n * 512);
  for (std::uint64_t r = 0; r < n; ++r) c.plan.slices.push_back({"a", {r, 0, 1, 256}, m, (n - 1 - r) * 512, 0, 2});
  return c;
}

/// One tensor, each column somewhere else: a permuted projection.
Case columns(std::uint64_t n) {
  Case c{"columns in reverse order", {{"a", Dtype::bf16, {256, n}, {}, {}}}, {}, {}};
  const std::uint32_t m = c.memory(n * 512);
  for (std::uint64_t k = 0; k < n; ++k) c.plan.slices.push_back({"a", {0, k, 256, 1}, m, (n - 1 - k) * 2, n * 2, 2});
  return c;
}

/// Small experts, stacked, gate and up fused.
Case experts(std::uint64_t n) {
  Case c{"stacked experts", {}, {}, {}};
  const std::uint64_t of_layer = 512;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (i % of_layer == 0) c.memory(of_layer * 64 * 64 * 2);
    const std::string name = "expert." + std::to_string(i);
    c.specs.push_back({name, Dtype::bf16, {64, 64}, {}, {}});
    c.plan.slices.push_back(
        {name, {0, 0, 64, 64}, static_cast<std::uint32_t>(i / of_layer), i % of_layer * 8192, 128, 2});
  }
  return c;
}

/// Blocks of one tensor, of which neighbours begin at different rows.
Case bricks(std::uint64_t n) {
  const std::uint64_t across = 64;
  const std::uint64_t high = n / across;
  const std::uint64_t size = 32;
  const std::uint64_t row_count = high * size;
  Case c{"bricks", {{"a", Dtype::bf16, {row_count, across * size}, {}, {}}}, {}, {}};
  const std::uint32_t m = c.memory(row_count * across * size * 2);
  std::uint64_t at = 0;
  for (std::uint64_t k = 0; k < across; ++k) {
    for (std::uint64_t row = 0; row < row_count;) {
      const std::uint64_t rows_here = std::min(row == 0 ? 1 + k % size : size, row_count - row);
      c.plan.slices.push_back({"a", {row, k * size, rows_here, size}, m, at, size * 2, 2});
      at += rows_here * size * 2;
      row += rows_here;
    }
  }
  return c;
}

/// Pairs that lie between each other's elements with other strides: nothing but their addresses tells them apart.
Case pitches(std::uint64_t n) {
  Case c{"mixed pitches", {{"a", Dtype::bf16, {n * 4, 16}, {}, {}}}, {}, {}};
  const std::uint64_t pair_bytes = 256;
  const std::uint32_t m = c.memory((n + 1) / 2 * pair_bytes);
  for (std::uint64_t i = 0; i < n; ++i) {
    PlacedSlice slice{"a", {i * 4, 0, 4, 16}, m, i / 2 * pair_bytes, 64, 4};
    if (i % 2 != 0) slice.offset += 2, slice.row_stride = 4, slice.col_stride = 16;
    c.plan.slices.push_back(slice);
  }
  return c;
}

void report(Case c) {
  auto layout = Layout::build(c.specs);
  if (!layout.ok()) {
    std::printf("%s: %s\n", c.name.c_str(), layout.error().to_string().c_str());
    return;
  }
  const std::size_t slices = c.plan.slices.size();
  std::shared_ptr<const Placement> placement;
  const double build_s = timed([&] {
    auto built = Placement::build(*layout, std::move(c.plan));
    if (built.ok()) {
      placement = *built;
    } else {
      std::printf("%s: %s\n", c.name.c_str(), built.error().to_string().c_str());
    }
  });
  if (placement == nullptr) return;
  std::optional<HostExecutor> executor;
  std::vector<std::uint64_t> rest(placement->rest_bytes() / 8 + 1);
  const double bind_s = timed([&] {
    executor.emplace(*HostExecutor::make(placement, HostExecutor::Rest::given));
    executor->set_rest(reinterpret_cast<std::byte*>(rest.data()));
  });
  // Every hundredth element of every tile.
  std::vector<std::vector<std::byte>> changes;
  std::uint64_t elements = 0;
  const TileSet& tiles = parts_of(*placement).tiles;
  for (std::uint64_t rank = 0; rank < tiles.tiles(); ++rank) {
    std::vector<std::uint16_t> words;
    for (std::uint64_t at = rank % 100; at < tile_of(**layout, tiles.nth(rank)).rect.elements(); at += 100) {
      words.push_back(static_cast<std::uint16_t>(at));
    }
    elements += words.size();
    words.resize(words.size() * 2);
    changes.emplace_back(words.size() * 2);
    std::memcpy(changes.back().data(), words.data(), changes.back().size());
  }
  const double exchange_s = timed([&] {
    for (std::uint64_t rank = 0; rank < tiles.tiles(); ++rank) {
      executor->exchange_words(rank, static_cast<std::uint32_t>(changes[rank].size() / 4), changes[rank]);
    }
  });
  std::vector<std::byte> scratch(kTileElementsMax * 2);
  const double gather_s = timed([&] {
    for (std::uint64_t rank = 0; rank < tiles.tiles(); ++rank) executor->gather_tile(rank, scratch.data());
  });
  std::printf(
      "%-26s %6zu slices %6llu tiles %7zu regions: build %7.3f s, bind %7.3f s, exchange of %llu elements %7.3f s "
      "(%.0f ns each), gather of all %7.3f s\n",
      c.name.c_str(), slices, static_cast<unsigned long long>(tiles.tiles()), parts_of(*placement).regions.size(),
      build_s, bind_s, static_cast<unsigned long long>(elements), exchange_s,
      exchange_s * 1e9 / static_cast<double>(elements), gather_s);
}

}  // namespace
}  // namespace deltasync

int main(int argc, char** argv) {
  const std::uint64_t slices = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 50'000;
  for (const auto& make :
       {deltasync::rows, deltasync::columns, deltasync::experts, deltasync::bricks, deltasync::pitches}) {
    deltasync::report(make(slices));
  }
}
