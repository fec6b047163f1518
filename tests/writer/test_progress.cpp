// However a layout is cut into slices, the elements of each batch add up to what it has.
#include "writer/progress.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/model.hpp"

namespace deltasync {
namespace {

std::vector<TensorSpec> specs() {
  auto specs = test::sample_specs();
  TensorSpec wide{"wide", Dtype::f32, {64, 1024 * 128}, {}, {}};  // a band larger than a batch
  for (std::uint64_t cut = 1024; cut < 1024 * 128; cut += 1024) wide.col_cuts.push_back(cut);
  specs.push_back(wide);
  specs.push_back({"tall", Dtype::bf16, {5000, 1000}, {1234, 4001}, {}});
  for (int i = 0; i < 200; ++i) specs.push_back({"small" + std::to_string(i), Dtype::bf16, {7, 3}, {}, {}});
  return specs;
}

/// Cuts [0, n) into pieces of random lengths.
std::vector<std::uint64_t> random_cuts(test::Random& random, std::uint64_t n, std::uint64_t pieces) {
  std::vector<std::uint64_t> cuts{0, n};
  for (std::uint64_t i = 1; i < pieces; ++i) cuts.push_back(random.below(n + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

std::vector<std::uint64_t> sums(const BatchCounter& counter) {
  std::vector<std::uint64_t> sums(counter.batches(), 0);
  for (const auto& part : counter.parts()) sums[part.batch] += part.elements;
  return sums;
}

TEST(BatchCounter, AnySlicesAddUpToEachBatchsElements) {
  const LayoutPtr layout = Layout::build(specs()).value();
  const auto batches = delta::make_batches(*layout);
  const auto elements = delta::batch_elements(*layout, batches);
  ASSERT_GT(batches.size(), 8u);
  const std::vector<std::uint64_t> expected(elements.begin(), elements.end());
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    test::Random random(seed);
    BatchCounter counter(layout);
    for (std::uint32_t t = 0; t < layout->tensors().size(); ++t) {
      const Tensor& tensor = layout->tensors()[t];
      const auto rows = random_cuts(random, tensor.rows, random.below(4));
      const auto cols = random_cuts(random, tensor.cols, random.below(4));
      for (std::size_t r = 0; r + 1 < rows.size(); ++r) {
        for (std::size_t c = 0; c + 1 < cols.size(); ++c) {
          counter.add(t, {rows[r], cols[c], rows[r + 1] - rows[r], cols[c + 1] - cols[c]});
        }
      }
    }
    EXPECT_EQ(sums(counter), expected) << "seed " << seed;
    counter.clear();
    EXPECT_TRUE(counter.parts().empty());
  }
}

TEST(BatchCounter, ASliceCountsOnlyWhereItLies) {
  const LayoutPtr layout = Layout::build({{"t", Dtype::bf16, {4096, 1024}, {}, {}}}).value();
  ASSERT_EQ(delta::make_batches(*layout).size(), 2u);
  BatchCounter counter(layout);
  counter.add(0, {2000, 10, 96, 100});
  EXPECT_EQ(sums(counter), (std::vector<std::uint64_t>{48 * 100, 48 * 100}));
}

TEST(BatchCounter, SmallTensorsOfOneBatchMakeOnePart) {
  std::vector<TensorSpec> many;
  for (int i = 0; i < 1000; ++i) many.push_back({"t" + std::to_string(i), Dtype::bf16, {16}, {}, {}});
  const LayoutPtr layout = Layout::build(many).value();
  BatchCounter counter(layout);
  for (std::uint32_t t = 0; t < 1000; ++t) counter.add(t, {0, 0, 1, 16});
  ASSERT_EQ(counter.parts().size(), 1u);
  EXPECT_EQ(counter.parts()[0].elements, 16'000u);
}

}  // namespace
}  // namespace deltasync
