// An engine with weights in memory of its own: updates are written there, in place. It keeps one tensor as it travels
// and the other one transposed, until it has the version that it is told to end with.
//
//   engine 127.0.0.1:7070 step_3
#include <deltasync/placement.hpp>
#include <deltasync/receiver.hpp>
#include <deltasync/target.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

using namespace deltasync;

namespace {

LiveMemory memory_of(const char* name, std::vector<float>& values) {
  return {.name = name,
          .base = reinterpret_cast<std::byte*>(values.data()),
          .bytes = values.size() * sizeof(float),
          .dtype = Dtype::f32,
          .whole = true};
}

Status run(const std::string& endpoint, const std::string& last_label) {
  const auto minute = [] { return CallOptions::within(std::chrono::minutes(1)); };

  std::vector<float> embed(1000 * 64);  // as in the checkpoint
  std::vector<float> head(1000 * 64);   // 64 × 1000 there, 1000 × 64 here

  constexpr std::uint64_t element = sizeof(float);
  PlacementPlan plan;
  plan.memories = {memory_of("embed", embed), memory_of("head_t", head)};
  plan.slices = {
      {.tensor = "embed.weight",
       .rect = {.rows = 1000, .cols = 64},
       .memory = 0,
       .row_stride = 64 * element,
       .col_stride = element},
      {.tensor = "head.weight",
       .rect = {.rows = 64, .cols = 1000},
       .memory = 1,
       .row_stride = element,
       .col_stride = 64 * element},
  };

  DS_ASSIGN(const auto receiver, Receiver::connect({.endpoint = endpoint, .attest_commits = true}, minute()));
  DS_ASSIGN(const auto placement, Placement::build(receiver->layout(), plan));
  DS_ASSIGN(auto target, make_placed_target(placement));
  DS_TRY(receiver->bind(std::move(target), placement->slices(), minute()));
  do {
    DS_ASSIGN(const auto update, receiver->pull({.newer = true}, minute()));
    // Here the engine finishes the batch that it is at: from now on nothing may compute with the weights.
    DS_TRY(update->commit(minute()));
  } while (receiver->current()->label != last_label);

  std::printf("embed begins with %g %g, head_t with %g %g\n", embed[0], embed[1], head[0], head[1]);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: engine HOST:PORT LABEL\n"), 2;
  const Status done = run(argv[1], argv[2]);
  if (!done) return std::fprintf(stderr, "engine: %s\n", done.error().to_string().c_str()), 1;
}
