// Writes cases for the reference decoder: DIR/NAME/{layout, before, after, delta}.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "tests/support/model.hpp"

namespace {

using namespace deltasync;

void write(const std::filesystem::path& path, ByteSpan bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    std::exit(1);
  }
}

void write_delta(const std::filesystem::path& dir, const Layout& layout, ByteSpan before, ByteSpan after,
                 const delta::Delta& delta) {
  std::filesystem::create_directories(dir);
  write(dir / "layout", layout.encode());
  write(dir / "before", before);
  write(dir / "after", after);
  write(dir / "delta", delta::to_container(delta));
}

/// And DIR-compact, the same delta in exponent classes.
void write_case(const std::filesystem::path& dir, const Layout& layout, ByteSpan before, ByteSpan after,
                delta::ValueForm form) {
  ThreadPool pool(2, "cases");
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, before, digests, pool);
  delta::EncodeRequest request;
  request.from = {7, 1};
  request.to = {7, 2};
  request.from_root = delta::root_digest(digests);
  request.form = form;
  const delta::Delta delta = delta::encode(layout, before, after, digests, request, pool);
  write_delta(dir, layout, before, after, delta);
  write_delta(dir.string() + "-compact", layout, before, after, delta::compact(layout, delta, before, pool).value());
}

/// Several steps of a model as one delta: some tiles in one step only, some new as a whole in the middle.
void write_merged(const std::filesystem::path& dir, const test::TestModel& model, delta::ValueForm form) {
  ThreadPool pool(2, "cases");
  const Layout& layout = *model.layout;
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, model.half, digests, pool);
  std::vector<std::byte> half = model.half;
  std::vector<delta::Delta> steps;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const std::vector<std::byte> before = half;
    test::mutate(half, layout, i == 2 ? 0.0003 : 0.02, 40 + i);
    const Tensor& whole = layout.tensors()[i * 3];
    test::Random random(i);
    for (std::uint64_t b = 0; b < whole.bytes; ++b) half[whole.offset + b] = static_cast<std::byte>(random.next());
    delta::EncodeRequest request;
    request.from = {7, 1 + i};
    request.to = {7, 2 + i};
    request.from_root = delta::root_digest(digests);
    request.form = form;
    steps.push_back(delta::encode(layout, before, half, digests, request, pool));
  }
  std::vector<const delta::Delta*> chain;
  for (const delta::Delta& step : steps) chain.push_back(&step);
  delta::MergeOptions options;
  options.read_target = [&](std::span<const std::uint64_t> tiles, std::byte* out) {
    for (const std::uint64_t index : tiles) {
      const Tile tile = tile_of(layout, index);
      const Tensor& tensor = layout.tensors()[tile.tensor];
      const std::size_t row_bytes = tile.rect.cols * tensor.element_bytes;
      for (std::uint64_t r = 0; r < tile.rect.rows; ++r, out += row_bytes) {
        const std::size_t row = tensor.offset + (tile.rect.row + r) * tensor.row_bytes();
        std::memcpy(out, &half[row + tile.rect.col * tensor.element_bytes], row_bytes);
      }
    }
    return true;
  };
  write_delta(dir, layout, model.half, half, delta::merge(layout, chain, options, pool).value().value());
}

/// A tensor of `dtype` that goes through every pair of the patterns at which signs and magnitudes turn.
void write_patterns(const std::filesystem::path& dir, Dtype dtype) {
  const std::size_t width = dtype_bytes(dtype);
  const std::uint64_t top = std::uint64_t{1} << (width * 8 - 1);
  const std::uint64_t patterns[] = {0, 1, 2, 7, top / 2, top - 2, top - 1, top, top + 1, top + 9, ~std::uint64_t{0}};
  const std::size_t n = std::size(patterns);
  const auto layout = Layout::build({{"t", dtype, {n * 100, n}, {}, {}}}).value();
  std::vector<std::byte> before(layout->half_bytes());
  for (std::size_t i = 0; i < n * n * 100; ++i) std::memcpy(&before[i * width], &patterns[i % n], width);
  std::vector<std::byte> after = before;
  // Sparse enough for ulp planes to win, and each pair occurs.
  for (std::size_t i = 0; i < n * n; ++i)
    std::memcpy(&after[(i * 97 + i % n) % (n * n * 100) * width], &patterns[i / n], width);
  write_case(dir, *layout, before, after, delta::ValueForm::ulp);
}

/// A tensor of floats in which mostly those of the smallest exponent change, and some to the patterns at which signs
/// and magnitudes turn: exponent classes are the smallest.
void write_classes(const std::filesystem::path& dir, Dtype dtype, unsigned exponent_bits) {
  const std::size_t width = dtype_bytes(dtype);
  const std::uint64_t top = std::uint64_t{1} << (width * 8 - 1);
  const std::uint64_t patterns[] = {0, 1, top - 1, top, top + 1, top / 2, ~std::uint64_t{0}};
  const unsigned mantissa_bits = static_cast<unsigned>(width) * 8 - 1 - exponent_bits;
  const auto layout = Layout::build({{"t", dtype, {100, 300}, {}, {130}}}).value();
  std::vector<std::byte> before(layout->half_bytes());
  std::vector<std::byte> after(layout->half_bytes());
  test::Random random(exponent_bits);
  for (std::size_t i = 0; i < 30000; ++i) {
    const std::uint64_t below_half = random.below(6);
    const std::uint64_t exponent = (std::uint64_t{1} << (exponent_bits - 1)) - below_half;
    const std::uint64_t old =
        random.below(2) * top | exponent << mantissa_bits | random.below(std::uint64_t{1} << mantissa_bits);
    std::uint64_t changed = old;
    if (random.below(below_half == 5 ? 4 : 100) == 0) {
      changed = random.below(2) == 0 ? old + 1 : old - 1;
      if (random.below(20) == 0) changed = patterns[random.below(std::size(patterns))];
    }
    std::memcpy(&before[i * width], &old, width);
    std::memcpy(&after[i * width], &changed, width);
  }
  write_case(dir, *layout, before, after, delta::ValueForm::ulp);
}

/// All tiles of a model as they are sent to who asks for packed ones.
void write_packed(const std::filesystem::path& dir, const test::TestModel& model) {
  ThreadPool pool(2, "cases");
  const Layout& layout = *model.layout;
  std::vector<std::byte> before = model.half;
  test::mutate(before, layout, 0.5, 9);
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::Delta delta;
  delta.layout = layout.digest();
  delta.from = {7, 1};
  delta.to = {7, 2};
  delta::half_digests(layout, before, digests, pool);
  delta.from_root = delta::root_digest(digests);
  delta::half_digests(layout, model.half, digests, pool);
  delta.to_root = delta::root_digest(digests);
  std::vector<std::uint64_t> tiles(layout.tile_count());
  for (std::uint64_t t = 0; t < tiles.size(); ++t) tiles[t] = t;
  delta.frames.push_back(delta::packed_frame(layout, model.half, tiles, digests));
  delta.changed = delta.frames.front().changed;
  delta.frame_bytes = delta.frames.front().bytes.size();
  write_delta(dir, layout, before, model.half, delta);
}

/// A tensor in which nearly all elements change, most by little, some by any difference.
void write_dense(const std::filesystem::path& dir, Dtype dtype) {
  const std::size_t width = dtype_bytes(dtype);
  const auto layout = Layout::build({{"t", dtype, {30, 31}, {}, {20}}}).value();
  std::vector<std::byte> before(layout->half_bytes());
  test::Random random(width);
  for (std::byte& b : before) b = static_cast<std::byte>(random.next());
  std::vector<std::byte> after = before;
  for (std::size_t i = 0; i < 30 * 31; ++i) {
    std::uint64_t element = 0;
    std::memcpy(&element, &before[i * width], width);
    const std::uint64_t kind = random.below(200);
    element += kind == 0 ? random.next() : random.below(13) - 6;
    std::memcpy(&after[i * width], &element, width);
  }
  write_case(dir, *layout, before, after, delta::ValueForm::ulp);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_reference_cases DIR\n");
    return 1;
  }
  const std::filesystem::path dir = argv[1];
  auto specs = test::sample_specs();
  specs.push_back({"panels", Dtype::bf16, {70, 500}, {7, 64}, {3, 100, 356}});
  const test::TestModel model = test::make_model(3, specs);
  for (const double density : {0.0, 0.002, 0.03, 0.6}) {
    std::vector<std::byte> after = model.half;
    if (density > 0) test::mutate(after, *model.layout, density, 3);
    const std::string name = "model-" + std::to_string(static_cast<int>(density * 1000));
    write_case(dir / (name + "-ulp"), *model.layout, model.half, after, delta::ValueForm::ulp);
    write_case(dir / (name + "-absolute"), *model.layout, model.half, after, delta::ValueForm::absolute);
  }
  write_packed(dir / "packed", model);
  write_merged(dir / "merged-ulp", model, delta::ValueForm::ulp);
  write_merged(dir / "merged-absolute", model, delta::ValueForm::absolute);
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::i64,
                            Dtype::i32, Dtype::i16, Dtype::i8, Dtype::u8, Dtype::boolean, Dtype::f8_e8m0,
                            Dtype::f8_e4m3fnuz, Dtype::f8_e5m2fnuz, Dtype::c64}) {
    write_patterns(dir / ("patterns-" + std::string(to_string(dtype))), dtype);
    if (dtype != Dtype::boolean) write_dense(dir / ("dense-" + std::string(to_string(dtype))), dtype);
  }
  const std::pair<Dtype, unsigned> floats[] = {{Dtype::f64, 11},        {Dtype::f32, 8},        {Dtype::f16, 5},
                                               {Dtype::bf16, 8},        {Dtype::f8_e4m3, 4},    {Dtype::f8_e5m2, 5},
                                               {Dtype::f8_e4m3fnuz, 4}, {Dtype::f8_e5m2fnuz, 5}};
  for (const auto& [dtype, exponent_bits] : floats) {
    write_classes(dir / ("classes-" + std::string(to_string(dtype))), dtype, exponent_bits);
  }
}
