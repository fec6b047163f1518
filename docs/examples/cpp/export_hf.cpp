// Two ranks of a trainer share a model by tensor parallelism, under names of their own and with two tensors fused. A
// page says what these are in HuggingFace's form, a plan which rank has which bytes; carried out, it is a model
// directory. (Here one program is both ranks.)
//
//   export_hf MODEL_DIR
#include <deltasync/export.hpp>
#include <deltasync/layout.hpp>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

using namespace deltasync;

namespace {

constexpr const char* kPage = R"(
name = "toy"
architectures = ["ToyForCausalLM"]
[[rows]]
mcore = "embedding.weight"
hf = "model.embed_tokens.weight"
[[rows]]
mcore = "layers.{L}.fc1.weight"
parts = "[gate: D / 2, up: D / 2]"
hf.gate = "model.layers.{L}.gate_proj.weight"
hf.up = "model.layers.{L}.up_proj.weight"
)";
constexpr const char* kConfig = R"({"architectures": ["ToyForCausalLM"]})";

/// What rank 0 or 1 has: half of the embedding, and half of each part of fc1.
std::vector<ShardPiece> pieces_of(std::uint64_t rank) {
  const auto rows = [](std::string key, std::uint64_t of, std::uint64_t first, std::uint64_t count) {
    return ShardPiece{.key = std::move(key),
                      .dtype = Dtype::f32,
                      .global_shape = {of, 64},
                      .offset = {first, 0},
                      .shape = {count, 64}};
  };
  return {rows("embedding.weight", 1000, rank * 500, 500),         // vocabulary
          rows("layers.0.fc1.weight", 256, rank * 64, 64),         // gate
          rows("layers.0.fc1.weight", 256, 128 + rank * 64, 64)};  // up
}

/// The memory of a piece: each element is the number of its row in the whole tensor.
std::vector<float> values_of(const ShardPiece& piece) {
  std::vector<float> values;
  for (std::uint64_t row = 0; row < piece.shape[0]; ++row) {
    values.insert(values.end(), piece.shape[1], static_cast<float>(piece.offset[0] + row));
  }
  return values;
}

Status write_file(const std::filesystem::path& path, std::span<const std::byte> first,
                  std::span<const std::byte> then) {
  std::ofstream file(path, std::ios::binary);
  for (const auto part : {first, then}) {
    file.write(reinterpret_cast<const char*>(part.data()), static_cast<std::streamsize>(part.size()));
  }
  if (!file.flush()) return Error(Errc::io, path.string() + " cannot be written");
  return {};
}

Status run(const std::filesystem::path& dir) {
  DS_ASSIGN(const LayoutPtr layout,
            Layout::build({
                {.name = "model.embed_tokens.weight", .dtype = Dtype::f32, .shape = {1000, 64}},
                {.name = "model.layers.0.gate_proj.weight", .dtype = Dtype::f32, .shape = {128, 64}},
                {.name = "model.layers.0.up_proj.weight", .dtype = Dtype::f32, .shape = {128, 64}},
            }));
  DS_ASSIGN(const ExportFamily page, parse_family(kPage, "toy.toml"));
  const std::vector<ExportFamily> pages = {page};
  const std::vector<std::vector<ShardPiece>> shards = {pieces_of(0), pieces_of(1)};
  DS_ASSIGN(const ExportPlan plan, plan_export(pages, kConfig, layout, shards));

  std::vector<std::byte> model(layout->half_bytes());
  for (const ExportCopy& copy : plan.copies) {  // each rank those of its own
    const ShardPiece& piece = shards[copy.rank][copy.piece];
    const Tensor& tensor = layout->tensors()[copy.tensor];
    const std::vector<float> values = values_of(piece);
    DS_TRY(apply_on_host(plan, copy, piece.dtype, std::as_bytes(std::span(values)),
                         std::span(model).subspan(tensor.offset, tensor.bytes)));
  }

  std::filesystem::create_directories(dir);
  const Sidecar sidecar = make_sidecar(*layout);
  DS_TRY(write_file(dir / sidecar.weights[0].name, sidecar.weights[0].bytes,
                    std::span(model).first(layout->model_bytes())));
  DS_TRY(write_file(dir / "config.json", std::as_bytes(std::span(kConfig, std::strlen(kConfig))), {}));

  DS_ASSIGN(const HfModel written, HfModel::open(dir));
  for (std::uint32_t i = 0; i < written.layout()->tensors().size(); ++i) {
    const std::span<const std::byte> bytes = written.tensor(i);
    float first = 0;
    float last = 0;
    std::memcpy(&first, bytes.data(), sizeof first);
    std::memcpy(&last, bytes.last(sizeof last).data(), sizeof last);
    std::printf("%s: rows %g to %g\n", written.layout()->tensors()[i].spec.name.c_str(), first, last);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: export_hf MODEL_DIR\n"), 2;
  const Status done = run(argv[1]);
  if (!done) return std::fprintf(stderr, "export_hf: %s\n", done.error().to_string().c_str()), 1;
}
