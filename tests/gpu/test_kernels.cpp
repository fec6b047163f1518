// Every kernel over random placements, against what the host does with the same. Compiled twice: for devices that are
// played on the host, and for a real one (label gpu).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "gpu/cuda_device.hpp"
#include "gpu/fake_device.hpp"
#include "gpu/host_device.hpp"
#include "tests/gpu/placed_model.hpp"

namespace deltasync::test {
namespace {

using gpu::ChangeKind;
using gpu::MoveTiles;

#if defined(DELTASYNC_SANITIZED)
constexpr std::uint64_t kSeeds = 3;
#else
constexpr std::uint64_t kSeeds = 12;
#endif

struct Kind {
  const char* name;
  std::function<Result<std::unique_ptr<gpu::Device>>(std::uint64_t seed)> make;
};
using Param = std::tuple<Kind, std::uint64_t>;

/// Changed elements of one tile, as a delta has them.
struct Changes {
  std::vector<std::uint16_t> positions;
  std::vector<std::byte> before;
  std::vector<std::byte> after;
  std::vector<std::byte> differences;
};

template <class U>
void add_difference(bool is_float, const std::byte* before, const std::byte* after, std::vector<std::byte>& out) {
  const U old = load<U>(before);
  const U now = load<U>(after);
  const U difference = is_float ? static_cast<U>(delta::ulp_map<U, true>(now) - delta::ulp_map<U, true>(old))
                                : static_cast<U>(now - old);
  const ByteSpan bytes = bytes_of(difference);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

class Kernels : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    const Kind& kind = std::get<0>(GetParam());
    const std::uint64_t seed = std::get<1>(GetParam());
    auto device = kind.make(seed);
    if (!device.ok()) GTEST_SKIP() << device.error().to_string();
    device_ = *std::move(device);
    placed_.emplace(*device_, seed);
    staged_ = placed_->staged(staged_bytes_);
    after_ = placed_->model.half;
    mutate(after_, layout(), std::vector<double>{0.01, 0.3, 1.0}[seed % 3], seed + 77);
    // With even seeds the memories are of two kinds, as if on two devices.
    for (std::uint32_t side = 0; side < 2; ++side) {
      tables_[side] =
          placed_->tables([&](std::uint32_t memory) { return seed % 2 != 0 ? side == 0 : memory % 2 == side; });
    }
    all_ = placed_->tables([](std::uint32_t) { return true; });
  }

  const Layout& layout() const { return placed_->layout(); }
  const std::vector<std::byte>& before() const { return placed_->model.half; }
  std::uint32_t blocks_per_tile(std::uint32_t block_bytes = gpu::kBlockBytes) const {
    return gpu::blocks_for(placed_->largest_tile(), block_bytes);
  }

  static placement::WordTable up(Work& work, const placement::WordTables& tables) {
    return {work.up(tables.tiles), work.up(tables.regions)};
  }
  MoveTiles move(Work& work, const placement::WordTables& tables, MoveTiles::Way way, std::byte* staging) const {
    return {up(work, tables),  work.up(staged_),
            staging,           static_cast<std::uint32_t>(staged_.size()),
            blocks_per_tile(), way};
  }
  void scatter(const std::vector<std::byte>& half) {
    Work work(*device_);
    std::byte* const staging = work.up(placed_->stage(half));
    for (const auto& tables : tables_) work.run(move(work, tables, MoveTiles::Way::scatter, staging));
  }
  /// Where a tile's bytes are the padding between tiles is not.
  void expect_staged(const std::vector<std::byte>& area, const std::vector<std::byte>& half) {
    for (const gpu::StagedTile& tile : staged_) {
      const auto expected = tile_bytes(layout(), half, placed_->tiles().nth(tile.rank));
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), area.begin() + static_cast<std::ptrdiff_t>(tile.at)))
          << "tile " << tile.rank;
    }
  }

  Changes changes_of(std::uint64_t rank) const {
    const std::uint64_t index = placed_->tiles().nth(rank);
    const Tensor& tensor = layout().tensors()[tile_of(layout(), index).tensor];
    const std::uint32_t width = tensor.element_bytes;
    const bool is_float = dtype_is_float(tensor.spec.dtype);
    const auto old = tile_bytes(layout(), before(), index);
    const auto now = tile_bytes(layout(), after_, index);
    Changes changes;
    for (std::size_t at = 0; at < old.size(); at += width) {
      if (std::memcmp(old.data() + at, now.data() + at, width) == 0) continue;
      changes.positions.push_back(static_cast<std::uint16_t>(at / width));
      const auto begin = static_cast<std::ptrdiff_t>(at);
      changes.before.insert(changes.before.end(), old.begin() + begin, old.begin() + begin + width);
      changes.after.insert(changes.after.end(), now.begin() + begin, now.begin() + begin + width);
      switch (width) {
        case 1: add_difference<std::uint8_t>(is_float, &old[at], &now[at], changes.differences); break;
        case 2: add_difference<std::uint16_t>(is_float, &old[at], &now[at], changes.differences); break;
        case 4: add_difference<std::uint32_t>(is_float, &old[at], &now[at], changes.differences); break;
        default: add_difference<std::uint64_t>(is_float, &old[at], &now[at], changes.differences); break;
      }
    }
    return changes;
  }

  /// The changes of all tiles, as kernels want them.
  struct Batch {
    std::vector<Changes> changes;
    std::vector<gpu::WordRun> runs;
    std::vector<gpu::WordPiece> pieces;
    std::vector<std::byte> bytes;
  };
  Batch batch(bool differences) const {
    Batch batch;
    for (std::uint64_t rank = 0; rank < placed_->tiles().tiles(); ++rank) {
      Changes changes = changes_of(rank);
      const auto count = static_cast<std::uint32_t>(changes.positions.size());
      if (count == 0) continue;
      const Tensor& tensor = layout().tensors()[tile_of(layout(), placed_->tiles().nth(rank)).tensor];
      const ChangeKind kind = !differences                        ? ChangeKind::elements
                              : dtype_is_float(tensor.spec.dtype) ? ChangeKind::ulp_differences
                                                                  : ChangeKind::differences;
      for (std::uint32_t first = 0; first < count; first += gpu::kBlockWords) {
        batch.pieces.push_back({static_cast<std::uint32_t>(batch.runs.size()), first});
      }
      batch.runs.push_back({rank, batch.bytes.size(), count, kind});
      const std::size_t at = batch.bytes.size();
      batch.bytes.resize(at + gpu::WordRun::bytes(count, tensor.element_bytes));
      std::memcpy(batch.bytes.data() + at, changes.positions.data(), count * sizeof(std::uint16_t));
      const auto& numbers = differences ? changes.differences : changes.after;
      std::memcpy(batch.bytes.data() + at + gpu::WordRun::numbers_at(count), numbers.data(), numbers.size());
      batch.changes.push_back(std::move(changes));
    }
    return batch;
  }
  /// Each run has these numbers.
  static void expect_numbers(const Batch& batch, const std::vector<std::byte>& bytes,
                             const std::vector<std::byte> Changes::*numbers) {
    for (std::size_t i = 0; i < batch.runs.size(); ++i) {
      const gpu::WordRun& run = batch.runs[i];
      const std::vector<std::byte>& expected = batch.changes[i].*numbers;
      ASSERT_EQ(std::memcmp(bytes.data() + run.at, batch.changes[i].positions.data(), run.count * 2u), 0);
      ASSERT_EQ(
          std::memcmp(bytes.data() + run.at + gpu::WordRun::numbers_at(run.count), expected.data(), expected.size()), 0)
          << "tile " << run.rank;
    }
  }
  std::vector<std::uint64_t> digests(const std::vector<std::byte>& half) const {
    std::vector<std::uint64_t> of_half(layout().tile_count());
    ThreadPool pool(1, "digests");
    delta::half_digests(layout(), half, of_half, pool);
    std::vector<std::uint64_t> placed;
    for (const gpu::StagedTile& tile : staged_) placed.push_back(of_half[placed_->tiles().nth(tile.rank)]);
    return placed;
  }

  std::unique_ptr<gpu::Device> device_;
  std::optional<PlacedModel> placed_;
  std::vector<gpu::StagedTile> staged_;
  std::uint64_t staged_bytes_ = 0;
  std::vector<std::byte> after_;
  placement::WordTables tables_[2];  ///< of both sides
  placement::WordTables all_;
};

TEST_P(Kernels, TilesGoToTheirPlacesAndBack) {
  scatter(before());
  placed_->expect_placed(before());
  Work work(*device_);
  std::byte* const staging = work.up(std::vector<std::byte>(staged_bytes_, std::byte{0x5A}));
  for (const auto& tables : tables_) work.run(move(work, tables, MoveTiles::Way::gather, staging));
  expect_staged(work.down(staging, staged_bytes_), before());
}

TEST_P(Kernels, TilesAreExchangedAndBack) {
  scatter(before());
  Work work(*device_);
  std::byte* const staging[2] = {work.up(placed_->stage(after_)), work.up(placed_->stage(after_))};
  for (int side = 0; side < 2; ++side) work.run(move(work, tables_[side], MoveTiles::Way::exchange, staging[side]));
  work.finish();
  placed_->expect_placed(after_);
  if (std::get<1>(GetParam()) % 2 != 0) {  // all on one side
    expect_staged(work.down(staging[0], staged_bytes_), before());
    expect_staged(work.down(staging[1], staged_bytes_), after_);
  }
  for (int side = 0; side < 2; ++side) work.run(move(work, tables_[side], MoveTiles::Way::exchange, staging[side]));
  work.finish();
  placed_->expect_placed(before());
}

TEST_P(Kernels, ChangedWordsAreExchangedAndBack) {
  scatter(before());
  const Batch changes = batch(false);
  Work work(*device_);
  gpu::ExchangeWords kernels[2];
  for (int side = 0; side < 2; ++side) {
    kernels[side] = {up(work, tables_[side]), work.up(changes.runs), work.up(changes.pieces), work.up(changes.bytes),
                     changes.pieces.size()};
    work.run(kernels[side]);
  }
  work.finish();
  placed_->expect_placed(after_);
  if (std::get<1>(GetParam()) % 2 != 0) {
    expect_numbers(changes, work.down(kernels[0].changes, changes.bytes.size()), &Changes::before);
  }
  for (const auto& kernel : kernels) work.run(kernel);
  work.finish();
  placed_->expect_placed(before());
  expect_numbers(changes, work.down(kernels[0].changes, changes.bytes.size()), &Changes::after);
}

TEST_P(Kernels, DigestsAreThoseOfTheHalf) {
  scatter(before());
  Work work(*device_);
  const std::vector<std::uint64_t> zeros(staged_.size());
  gpu::DigestTiles kernel{up(work, all_), work.up(staged_), work.up(zeros), static_cast<std::uint32_t>(staged_.size()),
                          blocks_per_tile(gpu::kDigestBlockBytes)};
  work.run(kernel);
  EXPECT_EQ(work.down(kernel.sums, staged_.size()), digests(before()));
}

TEST_P(Kernels, ChangesAreResolvedWithoutWriting) {
  scatter(before());
  const auto digests_before = digests(before());
  const auto digests_after = digests(after_);
  for (const bool differences : {true, false}) {
    const Batch changes = batch(differences);
    Work work(*device_);
    const std::vector<std::uint64_t> zeros(changes.runs.size());
    gpu::ResolveWords kernel{up(work, all_),         work.up(changes.runs), work.up(changes.pieces),
                             work.up(changes.bytes), work.up(zeros),        changes.pieces.size()};
    work.run(kernel);
    const auto sums = work.down(kernel.sums, zeros.size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const std::uint64_t rank = changes.runs[i].rank;
      ASSERT_EQ(digests_before[rank] + sums[i], digests_after[rank]) << "tile " << rank;
    }
    expect_numbers(changes, work.down(kernel.changes, changes.bytes.size()), &Changes::after);
  }
  placed_->expect_placed(before());
}

/// Whole blocks, the rest of one that not every thread has a part of, and sums that are there already.
TEST_P(Kernels, EveryWordOfMemoryIsRead) {
  constexpr std::uint64_t kBlock = gpu::SumMemory::kBytes;
  constexpr std::uint64_t kUnit = gpu::kUnitBytes;
  for (const std::uint64_t bytes : {std::uint64_t{0}, kUnit, kBlock - kUnit, kBlock, 3 * kBlock + 5 * kUnit}) {
    std::vector<std::uint64_t> words(bytes / sizeof(std::uint64_t));
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = delta::mix_word(i, std::get<1>(GetParam()));
    Work work(*device_);
    gpu::SumMemory kernel{reinterpret_cast<const std::byte*>(work.up(words)), bytes, nullptr};
    std::vector<std::uint64_t> expected(static_cast<std::size_t>(kernel.blocks()), 77);
    kernel.sums = work.up(expected);
    for (std::size_t i = 0; i < words.size(); ++i) expected[i * sizeof(std::uint64_t) / kBlock] += words[i];
    work.run(kernel);
    EXPECT_EQ(work.down(kernel.sums, expected.size()), expected) << bytes << " bytes";
  }
}

/// One element, whole squares and parts of them, rows or columns that are the nearer ones, gaps.
TEST_P(Kernels, MatricesWhoseColumnsLieApartAreGathered) {
  test::Random random(std::get<1>(GetParam()));
  for (const std::uint32_t width : {1u, 2u, 4u, 8u}) {
    for (const auto& [rows, cols] :
         {std::pair<std::uint64_t, std::uint64_t>{1, 1}, {32, 64}, {33, 31}, {1 + random.below(90), 5}}) {
      const bool by_rows = random.below(2) == 0;
      const std::uint64_t near = width * (1 + random.below(2));
      const std::uint64_t far = near * (by_rows ? rows : cols) + width * random.below(3);
      const auto [row_stride, col_stride] = by_rows ? std::pair(near, far) : std::pair(far, near);
      std::vector<std::byte> source(rows * row_stride + cols * col_stride);
      for (std::byte& byte : source) byte = static_cast<std::byte>(random.next());
      std::vector<std::byte> expected;
      for (std::uint64_t row = 0; row < rows; ++row) {
        for (std::uint64_t col = 0; col < cols; ++col) {
          const auto at = source.begin() + static_cast<std::ptrdiff_t>(row * row_stride + col * col_stride);
          expected.insert(expected.end(), at, at + width);
        }
      }
      Work work(*device_);
      std::byte* const to = work.up(std::vector<std::byte>(expected.size()));
      work.run(gpu::GatherMatrix{work.up(source), to, rows, cols, row_stride, col_stride, width});
      EXPECT_EQ(work.down(to, expected.size()), expected) << rows << " x " << cols << " of " << width;
    }
  }
}

std::string name_of(const testing::TestParamInfo<Param>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
}

#ifdef DELTASYNC_TEST_CUDA
INSTANTIATE_TEST_SUITE_P(Cuda, Kernels,
                         testing::Combine(testing::Values(Kind{"Cuda",
                                                               [](std::uint64_t) {
                                                                 return gpu::open_cuda_device(0, gpu::Use::kernels);
                                                               }}),
                                          testing::Range<std::uint64_t>(1, kSeeds + 1)),
                         name_of);
#else
Result<std::unique_ptr<gpu::Device>> make_fake(std::uint64_t seed) {
  gpu::FakeDevice::Options options;
  options.seed = seed;
  return std::unique_ptr<gpu::Device>(std::make_unique<gpu::FakeDevice>(options));
}
Result<std::unique_ptr<gpu::Device>> make_host(std::uint64_t /*has no chance in it*/) {
  return std::unique_ptr<gpu::Device>(std::make_unique<gpu::HostDevice>());
}
INSTANTIATE_TEST_SUITE_P(Played, Kernels,
                         testing::Combine(testing::Values(Kind{"Fake", make_fake}, Kind{"Host", make_host}),
                                          testing::Range<std::uint64_t>(1, kSeeds + 1)),
                         name_of);
#endif

}  // namespace
}  // namespace deltasync::test
