// A rollout process of a chaos run: follows an agent and looks at every element after each commit. A line each:
//
//   commit E N wrong COUNT heap BYTES [TENSOR:ELEMENT:IS:SHOULD_BE ...]      the first few wrong elements
//   error MESSAGE                                                 and it goes on
//
// Usage: chaos_reader HOST:PORT host|placed|shadow [TOKEN_FILE]
#include <malloc.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "chaos_model.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"

namespace deltasync::chaos {
namespace {

constexpr auto kBindLimit = std::chrono::seconds(20);
constexpr auto kPullLimit = std::chrono::seconds(20);
constexpr auto kPause = std::chrono::milliseconds(100);  ///< after an error
constexpr std::size_t kToldMax = 8;

/// An engine's memory: every second tensor lies transposed.
struct Engine {
  explicit Engine(const Layout& layout) {
    for (std::uint32_t t = 0; t < layout.tensors().size(); ++t) {
      const Tensor& tensor = layout.tensors()[t];
      parameters.emplace_back(static_cast<std::size_t>(tensor.bytes));
      const std::uint64_t width = tensor.element_bytes;
      const bool transposed = t % 2 == 1;
      looks.push_back({parameters.back().data(), transposed ? width : tensor.row_bytes(),
                       transposed ? tensor.rows * width : width});
    }
  }
  PlacementPlan plan(const Layout& layout) {
    PlacementPlan plan;
    for (std::uint32_t t = 0; t < layout.tensors().size(); ++t) {
      const Tensor& tensor = layout.tensors()[t];
      plan.memories.push_back({tensor.spec.name, parameters[t].data(), tensor.bytes, Device(), std::nullopt});
      plan.slices.push_back(
          {tensor.spec.name, {0, 0, tensor.rows, tensor.cols}, t, 0, looks[t].row_stride, looks[t].col_stride});
    }
    return plan;
  }

  std::vector<std::vector<std::byte>> parameters;
  std::vector<Look> looks;
};

class Reader {
 public:
  Reader(std::string endpoint, std::string kind, std::string token) : kind_(std::move(kind)) {
    options_.endpoint = std::move(endpoint);
    options_.token = std::move(token);
    options_.streams = 2;
    options_.threads = 1;
    options_.name = "chaos " + kind_;
  }

  [[noreturn]] void run() {
    for (;;) {
      if (const auto status = once(); !status) {
        std::printf("error %s\n", status.error().to_string().c_str());
        std::fflush(stdout);
        if (status.error().code() == Errc::layout_mismatch) receiver_.reset();
        std::this_thread::sleep_for(kPause);
      }
    }
  }

 private:
  Status once() {
    if (!receiver_) DS_TRY(connect());
    Want want;
    want.newer = true;
    DS_ASSIGN(auto update, receiver_->pull(want, CallOptions::within(kPullLimit)));
    if (update->report().mode == PullMode::up_to_date) return {};
    DS_TRY(update->commit());
    tell(update->report().version.id);
    return {};
  }

  Status connect() {
    DS_ASSIGN(auto receiver, Receiver::connect(options_, CallOptions::within(kBindLimit)));
    layout_ = receiver->layout();
    std::unique_ptr<Target> target;
    std::vector<Slice> slices;
    if (kind_ == "host") {
      target = make_host_target(layout_);
    } else {
      engine_ = std::make_unique<Engine>(*layout_);
      DS_ASSIGN(std::shared_ptr<const Placement> placement, Placement::build(layout_, engine_->plan(*layout_)));
      slices = placement->slices();
      PlacedTargetOptions options;
      if (kind_ == "shadow") options.shadow = ShadowOptions();
      DS_ASSIGN(target, make_placed_target(std::move(placement), options));
    }
    DS_TRY(receiver->bind(std::move(target), slices, CallOptions::within(kBindLimit)));
    receiver_ = std::move(receiver);
    return {};
  }

  Look look(std::uint32_t tensor) const {
    if (engine_) return engine_->looks[tensor];
    const Tensor& t = layout_->tensors()[tensor];
    return {host_target_memory(*receiver_->target()).data() + t.offset, t.row_bytes(), t.element_bytes};
  }

  void tell(const VersionId& id) const {
    std::vector<Wrong> found;
    std::uint64_t wrong = 0;
    for (std::uint32_t t = 0; t < layout_->tensors().size(); ++t) {
      wrong += find_wrong(layout_->tensors()[t], t, id.number, look(t), kToldMax, found);
    }
    const struct mallinfo2 heap = ::mallinfo2();
    std::printf("commit %llu %llu wrong %llu heap %zu", static_cast<unsigned long long>(id.epoch),
                static_cast<unsigned long long>(id.number), static_cast<unsigned long long>(wrong),
                heap.uordblks + heap.hblkhd);
    for (const Wrong& w : found) {
      std::printf(" %u:%llu:%llx:%llx", w.tensor, static_cast<unsigned long long>(w.element),
                  static_cast<unsigned long long>(w.is), static_cast<unsigned long long>(w.should_be));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const std::string kind_;
  ReceiverOptions options_;
  LayoutPtr layout_;
  std::unique_ptr<Engine> engine_;  // before the receiver, whose target writes into it
  std::unique_ptr<Receiver> receiver_;
};

}  // namespace
}  // namespace deltasync::chaos

int main(int argc, char** argv) {
  const std::string kind = argc > 2 ? argv[2] : "";
  if (argc > 4 || (kind != "host" && kind != "placed" && kind != "shadow")) {
    std::fprintf(stderr, "usage: chaos_reader HOST:PORT host|placed|shadow [TOKEN_FILE]\n");
    return 1;
  }
  std::string token;
  if (argc == 4) std::getline(std::ifstream(argv[3]), token);
  deltasync::chaos::Reader(argv[1], kind, token).run();
}
