// One rank of a chaos run's trainer. Told on standard input what to do, a line each, and answers with a line each:
//
//   epoch [E]           → epoch E             a fresh one, after that one, for all ranks
//   offload E N         → offloaded E N SECONDS, or failed E N MESSAGE
//   run E N END         → offloads the numbers N, N + 8 … below END one after the other; told as the last of them
//
// Usage: chaos_trainer SOCKET INDEX WRITERS VARIANT
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "chaos_model.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::chaos {
namespace {

constexpr auto kLimit = std::chrono::seconds(3);  ///< of one offload: a rank that dies costs the others so long

class Trainer {
 public:
  Trainer(std::string socket, std::uint32_t index, std::uint32_t writers, std::uint64_t variant)
      : index_(index), writers_(writers), layout_(make_layout(variant)) {
    options_.agent_socket = std::move(socket);
    options_.writer_index = index;
    options_.writers = writers;
    options_.threads = 1;
    options_.name = "rank " + std::to_string(index);
  }

  Result<OffloadReport> offload(Version version) {
    version.label = "step_" + std::to_string(version.id.number / kVariants);
    const CallOptions deadline = CallOptions::within(kLimit);
    DS_TRY(ensure(deadline));
    auto report = fill(version, deadline);
    if (!report) writer_->abort();
    return report;
  }

 private:
  /// Rows of each tensor that this rank writes.
  Rect part(const Tensor& tensor) const {
    const std::uint64_t first = tensor.rows * index_ / writers_;
    const std::uint64_t end = tensor.rows * (index_ + 1) / writers_;
    return {first, 0, end - first, tensor.cols};
  }

  Status ensure(const CallOptions& deadline) {
    if (!writer_) {
      DS_ASSIGN(writer_, Writer::attach(layout_, Sidecar(), options_, deadline));
      planned_ = false;
    }
    if (planned_ || writers_ == 1) return {};
    std::vector<TensorSlice> plan;
    for (std::uint32_t t = 0; t < layout_->tensors().size(); ++t) {
      const Rect rect = part(layout_->tensors()[t]);
      if (rect.elements() != 0) plan.push_back({t, rect});
    }
    DS_TRY(writer_->register_plan(plan, deadline));
    planned_ = true;
    return {};
  }

  Result<OffloadReport> fill(const Version& version, const CallOptions& deadline) {
    DS_TRY(writer_->begin(version, deadline));
    for (std::uint32_t t = 0; t < layout_->tensors().size(); ++t) {
      const Tensor& tensor = layout_->tensors()[t];
      const Rect rect = part(tensor);
      if (rect.elements() == 0) continue;
      const auto rows = make_rows(tensor, t, version.id.number, rect.row, rect.row + rect.rows);
      DS_TRY(writer_->write(t, rect, Source{rows.data()}));
    }
    return writer_->commit(deadline);
  }

  const std::uint32_t index_;
  const std::uint32_t writers_;
  const LayoutPtr layout_;
  WriterOptions options_;
  std::unique_ptr<Writer> writer_;
  bool planned_ = false;
};

int run(Trainer& trainer) {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string what;
    Version version;
    std::uint64_t end = 0;
    words >> what >> version.id.epoch >> version.id.number >> end;
    if (what == "epoch") {
      std::printf("epoch %llu\n", static_cast<unsigned long long>(make_epoch(version.id.epoch)));
    } else {
      auto report = trainer.offload(version);
      while (report && version.id.number + kVariants < end) {
        version.id.number += kVariants;
        report = trainer.offload(version);
      }
      std::printf("%s %llu %llu %s\n", report ? "offloaded" : "failed",
                  static_cast<unsigned long long>(version.id.epoch), static_cast<unsigned long long>(version.id.number),
                  report ? std::to_string(report->total_s).c_str() : report.error().to_string().c_str());
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace deltasync::chaos

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: chaos_trainer SOCKET INDEX WRITERS VARIANT\n");
    return 1;
  }
  const auto number = [&](int at) { return std::strtoul(argv[at], nullptr, 10); };
  deltasync::chaos::Trainer trainer(argv[1], static_cast<std::uint32_t>(number(2)),
                                    static_cast<std::uint32_t>(number(3)), number(4));
  return deltasync::chaos::run(trainer);
}
