// A trainer or an engine of test_plan.py, with its weights in memory. JSON lines; times are of the steady clock, which
// all hosts of a lab share.
//
//   fleet_member trainer MIB CHANGED EPOCH NODE ENDPOINT…  # of all trainer hosts; an offload for each line of its
//   input fleet_member engine ENDPOINT                            # follows
#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/part.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"
#include "deltasync/writer.hpp"
#include "net/auth.hpp"

namespace deltasync {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint32_t kTensors = 24;  // of which 1, 2, 3 or 4 hosts have as many
constexpr std::uint64_t kColumns = 1024;
CallOptions soon() {
  return CallOptions::within(std::chrono::minutes(10));
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Status tell(const Json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
  return {};
}

/// With pages, large ones if there are any. For as long as the process lives.
Result<std::span<std::byte>> make_memory(std::uint64_t bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return Error::from_errno("mmap", errno);
  ::madvise(at, bytes, MADV_HUGEPAGE);  // a hint
  std::memset(at, 1, bytes);
  return std::span(static_cast<std::byte*>(at), bytes);
}

/// Words of one magnitude; a step changes the last bit of some.
class Weights {
 public:
  Weights(std::span<std::byte> memory, std::uint64_t seed)
      : words_(reinterpret_cast<std::uint16_t*>(memory.data()), memory.size() / 2), random_(seed) {
    for (auto& word : words_) word = static_cast<std::uint16_t>(0x3C00 + random_() % 0x200);
  }
  void step(double changed) {
    std::geometric_distribution<std::size_t> gap(changed);
    for (std::size_t at = gap(random_); at < words_.size(); at += gap(random_) + 1) words_[at] ^= 1;
  }
  const std::byte* data() const { return reinterpret_cast<const std::byte*>(words_.data()); }

 private:
  std::span<std::uint16_t> words_;
  std::mt19937_64 random_;
};

struct Attached {
  std::unique_ptr<Writer> writer;
  std::vector<SliceSource> slices;
};

/// With the tensors of this node: all, or each so-and-so-manieth.
Result<Attached> attach(std::uint64_t rows, std::size_t node, const std::vector<std::string>& endpoints,
                        std::vector<Weights>& weights) {
  std::vector<TensorSpec> specs;
  for (std::uint32_t t = 0; t < kTensors; ++t) {
    specs.push_back({"layers." + std::to_string(t) + ".weight", Dtype::bf16, {rows, kColumns}, {}, {}});
  }
  DS_ASSIGN(const LayoutPtr whole, Layout::build(std::move(specs)));
  std::vector<TensorSlice> held;
  for (auto t = static_cast<std::uint32_t>(node); t < kTensors; t += static_cast<std::uint32_t>(endpoints.size())) {
    held.push_back({t, {0, 0, rows, kColumns}});
    DS_ASSIGN(const std::span memory, make_memory(2 * rows * kColumns));
    weights.emplace_back(memory, t + 1);
  }
  LayoutPtr layout = whole;
  Sidecar sidecar = make_sidecar(*whole);
  std::vector<TensorSlice> mine = held;
  if (endpoints.size() > 1) {
    std::vector<std::pair<std::string, std::string>> members;
    for (const std::string& endpoint : endpoints) members.emplace_back(endpoint, endpoint);
    DS_ASSIGN(auto part, make_part(whole, sidecar, held, members, static_cast<std::uint32_t>(node)));
    layout = part.first;
    sidecar = std::move(part.second);
    DS_ASSIGN(mine, slices_in_part(sidecar, *layout, held));
  }
  WriterOptions options;
  options.agent_socket = "agent.sock";
  Attached out;
  DS_ASSIGN(out.writer, Writer::attach(layout, sidecar, options, soon()));
  for (std::size_t i = 0; i < mine.size(); ++i) out.slices.push_back({mine[i], Source{weights[i].data()}});
  return out;
}

Status train(const std::vector<std::string>& args) {
  const double changed = std::stod(args.at(1));
  const std::uint64_t epoch = std::stoull(args.at(2));
  const std::vector<std::string> endpoints(args.begin() + 4, args.end());
  const std::uint64_t rows = (std::stoull(args.at(0)) << 20) / 2 / kTensors / kColumns;
  std::vector<Weights> weights;
  DS_ASSIGN(const Attached attached, attach(rows, std::stoull(args.at(3)), endpoints, weights));
  DS_TRY(tell({{"event", "attached"}}));
  std::string line;
  for (std::uint64_t number = 1; std::getline(std::cin, line); ++number) {
    const double began_s = now_s();
    const Version version{{epoch, number}, "step_" + std::to_string(number)};
    DS_TRY(attached.writer->begin(version, soon()));
    DS_TRY(attached.writer->write(attached.slices));
    DS_ASSIGN(const OffloadReport report, attached.writer->commit(soon()));
    const double sealed_s = now_s();
    DS_TRY(attached.writer->wait_ready(version.id, soon()));
    DS_TRY(tell({{"event", "offloaded"},
                 {"number", number},
                 {"began", began_s},
                 {"offload_s", report.total_s},
                 {"diff_s", now_s() - sealed_s}}));
    for (Weights& each : weights) each.step(changed);
  }
  return {};
}

Status serve(const std::string& endpoint) {
  ReceiverOptions options;
  options.endpoint = endpoint;
  options.link_gbps = 100;  // nothing comes packed
  DS_ASSIGN(options.token, net::read_token_file("../token"));
  DS_ASSIGN(const auto receiver, Receiver::connect(options, soon()));
  // An engine has its memory already: where pages have to be made first, that can take longer than the transfer.
  DS_ASSIGN(const std::span memory, make_memory(receiver->layout()->half_bytes()));
  DS_TRY(receiver->bind(make_host_target(receiver->layout(), memory), soon()));
  for (;;) {
    DS_ASSIGN(const auto staged, receiver->pull({.newer = true}, soon()));
    const double staged_s = now_s();
    DS_TRY(staged->commit());
    const PullReport& report = staged->report();
    DS_TRY(tell({{"event", "pulled"},
                 {"number", report.version.id.number},
                 {"mode", to_string(report.mode)},
                 {"at", now_s()},
                 {"commit_s", now_s() - staged_s},
                 {"transfer_s", report.transfer_s},
                 {"wire_bytes", report.wire_bytes}}));
  }
}

}  // namespace
}  // namespace deltasync

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + std::min(argc, 2), argv + argc);
  const bool trains = argc > 6 && std::string(argv[1]) == "trainer";
  if (!trains && argc != 3) return 2;
  const deltasync::Status ended = trains ? deltasync::train(args) : deltasync::serve(args[0]);
  if (ended) return 0;
  std::fprintf(stderr, "fleet_member: %s\n", ended.error().to_string().c_str());
  return 1;
}
