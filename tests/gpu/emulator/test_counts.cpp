// How many instructions of PTX the kernels' threads execute, for each element: a figure that grows when a kernel does
// more, on machines without a device. It is no time: machine code is other than PTX, and most of a kernel's time is its
// memory's.
#include <gtest/gtest.h>

#include <cstdio>

#include "gpu/cuda_device.hpp"
#include "tests/gpu/emulator/runtime.hpp"
#include "tests/gpu/work.hpp"

namespace deltasync::emulator {
namespace {

using gpu::MoveTiles;

/// A bf16 tensor of some tiles, below each other.
constexpr std::uint32_t kTiles = 4;
constexpr std::uint32_t kRows = 64;
constexpr std::uint32_t kCols = 1024;
constexpr std::uint32_t kTileElements = kRows * kCols;
constexpr std::uint64_t kElements = std::uint64_t{kTiles} * kTileElements;
constexpr std::uint32_t kEvery = 64;  ///< so many elements one is changed

class EmulatedCounts : public testing::Test {
 protected:
  EmulatedCounts() {
    live_ = bytes_up(kElements * 2);
    staging_ = bytes_up(kElements * 2);
    std::vector<gpu::StagedTile> staged;
    for (std::uint32_t i = 0; i < kTiles; ++i) staged.push_back({i, i * kTileElements * 2, kRows, 0});
    staged_ = work_.up(staged);
    sums_ = work_.up(std::vector<std::uint64_t>(kTiles));
  }

  std::byte* bytes_up(std::uint64_t bytes) {
    std::vector<std::uint64_t> words(bytes / 8);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = i * 0x9E3779B97F4A7C15u;
    return reinterpret_cast<std::byte*>(work_.up(words));
  }
  /// The tensor as it is, or with rows and columns exchanged.
  placement::WordTable table(bool transposed) {
    placement::WordRegion region{0, 0, std::uint64_t{kTiles} * kRows, kCols, live_, kCols * 2, 2};
    if (transposed) std::tie(region.row_stride, region.col_stride) = std::pair(2, kTiles * kRows * 2);
    std::vector<placement::WordTile> tiles;
    for (std::uint32_t i = 0; i < kTiles; ++i) tiles.push_back({i * kRows, 0, kCols, 2, 0, 1, 0});
    return {work_.up(tiles), work_.up(std::vector{region})};
  }
  MoveTiles move(bool transposed, MoveTiles::Way way) {
    return {table(transposed), staged_, staging_, kTiles, gpu::blocks_for(kTileElements * 2), way};
  }
  /// One run for each tile.
  template <class K>
  K changes(gpu::ChangeKind kind) {
    constexpr std::uint32_t kCount = kTileElements / kEvery;
    const std::uint64_t bytes = gpu::WordRun::bytes(kCount, 2);
    std::vector<std::uint64_t> all(kTiles * bytes / 8);
    std::vector<gpu::WordRun> runs;
    std::vector<gpu::WordPiece> pieces;
    for (std::uint32_t i = 0; i < kTiles; ++i) {
      runs.push_back({i, i * bytes, kCount, kind});
      auto* const positions = reinterpret_cast<std::uint16_t*>(reinterpret_cast<std::byte*>(all.data()) + i * bytes);
      for (std::uint32_t k = 0; k < kCount; ++k) positions[k] = static_cast<std::uint16_t>(k * kEvery + k % 7);
      for (std::uint32_t first = 0; first < kCount; first += gpu::kBlockWords) pieces.push_back({i, first});
    }
    K kernel;
    kernel.table = table(false);
    kernel.runs = work_.up(runs);
    kernel.pieces = work_.up(pieces);
    kernel.changes = reinterpret_cast<std::byte*>(work_.up(all));
    kernel.count = pieces.size();
    return kernel;
  }
  /// Prints a line, and compares with what it was.
  void expect(const char* name, const gpu::Kernel& kernel, std::uint64_t elements, double before) {
    work_.finish();
    take_counts();
    work_.run(kernel);
    work_.finish();
    const Counts counts = take_counts();
    const auto each = [&](std::uint64_t count) { return static_cast<double>(count) / static_cast<double>(elements); };
    std::printf("| %s | %.2f | %.3f | %.3f |\n", name, each(counts.instructions), each(counts.loads),
                each(counts.stores));
    // Other compilers make other code.
    if (CUDART_VERSION / 1000 == 13) {
      EXPECT_NEAR(each(counts.instructions), before, before / 10) << name;
    }
  }

  std::unique_ptr<gpu::Device> device_ = *gpu::open_cuda_device(0, gpu::Use::kernels);
  test::Work work_{*device_};
  std::byte* live_ = nullptr;
  std::byte* staging_ = nullptr;
  const gpu::StagedTile* staged_ = nullptr;
  std::uint64_t* sums_ = nullptr;
};

TEST_F(EmulatedCounts, AreWhatTheyWere) {
  using gpu::ChangeKind;
  expect("`MoveTiles`, scatter", move(false, MoveTiles::Way::scatter), kElements, 4.84);
  expect("`MoveTiles`, gather from a transposed parameter", move(true, MoveTiles::Way::gather), kElements, 91.75);
  expect("`DigestTiles`",
         gpu::DigestTiles{table(false), staged_, sums_, kTiles,
                          gpu::blocks_for(kTileElements * 2, gpu::kDigestBlockBytes)},
         kElements, 5.80);
  expect("`SumMemory`", gpu::SumMemory{live_, kElements * 2, reinterpret_cast<std::uint64_t*>(staging_)}, kElements,
         0.81);
  expect("`ExchangeWords`, a changed element", changes<gpu::ExchangeWords>(ChangeKind::elements), kElements / kEvery,
         47.00);
  auto resolve = changes<gpu::ResolveWords>(ChangeKind::ulp_differences);
  resolve.sums = sums_;
  expect("`ResolveWords`, a changed element", resolve, kElements / kEvery, 137.99);
}

}  // namespace
}  // namespace deltasync::emulator
