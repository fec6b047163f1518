// A trainer: publishes three versions of a model of two tensors.
//
//   deltasync-agent --socket /tmp/agent.sock --listen 127.0.0.1:7070 &
//   train /tmp/agent.sock
#include <deltasync/writer.hpp>

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

using namespace deltasync;

namespace {

Status train(const std::string& agent_socket) {
  const auto minute = [] { return CallOptions::within(std::chrono::minutes(1)); };

  DS_ASSIGN(const LayoutPtr layout, Layout::build({
                                        {.name = "embed.weight", .dtype = Dtype::f32, .shape = {1000, 64}},
                                        {.name = "head.weight", .dtype = Dtype::f32, .shape = {64, 1000}},
                                    }));
  DS_ASSIGN(const auto writer, Writer::attach(layout, Sidecar(), {.agent_socket = agent_socket}, minute()));

  std::vector<float> embed(1000 * 64, 0.5F);
  std::vector<float> head(64 * 1000, 0.25F);
  const std::uint64_t epoch = writer->fresh_epoch();
  for (std::uint64_t step = 1; step <= 3; ++step) {
    embed[step] += 1;  // the optimizer's step
    const Version version{{epoch, step}, "step_" + std::to_string(step)};
    const std::vector<std::pair<std::string, Source>> tensors = {{"embed.weight", {.data = embed.data()}},
                                                                 {"head.weight", {.data = head.data()}}};
    DS_ASSIGN(const OffloadReport report, writer->offload(version, tensors, minute()));
    DS_TRY(writer->wait_ready(version.id, minute()));
    std::printf("%s: the trainer waited %.1f ms\n", version.label.c_str(), report.total_s * 1e3);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: train AGENT_SOCKET\n"), 2;
  const Status done = train(argv[1]);
  if (!done) return std::fprintf(stderr, "train: %s\n", done.error().to_string().c_str()), 1;
}
