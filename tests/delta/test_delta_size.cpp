// What a delta costs on bf16 copies of an fp32 master that takes Adam-like steps.
#include <cmath>

#include "bench/synth.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

struct Step {
  LayoutPtr layout;
  std::vector<std::byte> before;
  std::vector<std::byte> after;
};

Step take_step(double density, Dtype dtype = Dtype::bf16) {
  Step step;
  step.layout = bench::decoder_layout(16u << 20, dtype).value();
  step.before.resize(step.layout->half_bytes());
  step.after.resize(step.layout->half_bytes());
  ThreadPool pool(2, "test");
  bench::SyntheticModel model(step.layout, density, 5, pool);
  model.write_half(step.before);
  model.step();
  model.write_half(step.after);
  return step;
}

TEST(DeltaSize, BitsPerChangeCountEveryByteOfTheContainer) {
  // The limits lie a little above what was measured.
  const struct { double density, bits_max; } cases[] = {{0.002, 14.2}, {0.01, 10.9}, {0.045, 8.6}};
  for (const auto& c : cases) {
    const Step step = take_step(c.density);
    const Delta delta = encode_between(*step.layout, step.before, step.after);
    const double n = static_cast<double>(step.layout->elements());
    const double p = static_cast<double>(delta.changed) / n;
    ASSERT_NEAR(p, c.density, c.density / 5);
    EXPECT_EQ(delta.stats[static_cast<unsigned>(Codec::raw)].tiles, 0U);
    const double bits = static_cast<double>(to_container(delta).size()) * 8 / static_cast<double>(delta.changed);
    const double positions = (-p * std::log2(p) - (1 - p) * std::log2(1 - p)) / p;
    EXPECT_LE(bits, c.bits_max) << "density " << p;
    EXPECT_GT(bits, positions) << "less than the positions alone: the changes are not what they should be";
  }
}

TEST(DeltaSize, ExponentClassesAreWorthTwoToThreeBitsAChange) {
  const struct {
    double density, bits_max, gain_min;
  } cases[] = {{0.002, 10.6, 3.0}, {0.01, 7.7, 3.0}, {0.045, 6.3, 2.0}};
  for (const auto& c : cases) {
    const Step step = take_step(c.density);
    const Delta delta = encode_between(*step.layout, step.before, step.after);
    ThreadPool pool(1, "test");
    const Delta compacted = compact(*step.layout, delta, step.before, pool).value();
    EXPECT_EQ(compacted.changed, delta.changed);
    const double bits = static_cast<double>(to_container(compacted).size()) * 8 / static_cast<double>(delta.changed);
    EXPECT_LE(bits, c.bits_max) << "density " << c.density;
    const double plain = static_cast<double>(to_container(delta).size()) * 8 / static_cast<double>(delta.changed);
    EXPECT_GE(plain - bits, c.gain_min) << "density " << c.density;
  }
}

TEST(DeltaSize, AStepOfTheMasterIsDense) {
  const Step step = take_step(0.0027, Dtype::f32);  // a learning rate of about 1e-6
  const Delta delta = encode_between(*step.layout, step.before, step.after);
  EXPECT_EQ(delta.stats[static_cast<unsigned>(Codec::dense_ulp)].tiles, step.layout->tile_count());
  EXPECT_GT(static_cast<double>(delta.changed), 0.98 * static_cast<double>(step.layout->elements()));
  const double bits = static_cast<double>(to_container(delta).size()) * 8 / static_cast<double>(delta.changed);
  EXPECT_LE(bits, 13.0);
}

// The estimate by which an encoder chooses must be the truth: the chosen codec is the smallest of those possible.
TEST(DeltaSize, AbsoluteIsLargerAndRawWinsWhereAllIsNew) {
  const Step step = take_step(0.01);
  const Delta ulp = encode_between(*step.layout, step.before, step.after);
  const Delta absolute = encode_between(*step.layout, step.before, step.after, ValueForm::absolute);
  EXPECT_LT(ulp.frame_bytes, absolute.frame_bytes);
  std::vector<std::byte> noise(step.layout->half_bytes());
  Random random(8);
  for (auto& b : noise) b = static_cast<std::byte>(random.next() >> 56);
  const Delta raw = encode_between(*step.layout, step.before, noise);
  EXPECT_EQ(raw.stats[static_cast<unsigned>(Codec::raw)].tiles, step.layout->tile_count());
  EXPECT_LT(raw.frame_bytes, step.layout->half_bytes() + step.layout->half_bytes() / 1000);
}

}  // namespace
}  // namespace deltasync::delta::test
