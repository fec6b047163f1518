#include "bench/device_offload.hpp"

#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "bench/processes.hpp"
#include "delta/delta.hpp"
#include "writer/relay_access.hpp"
#include "writer/session.hpp"

namespace deltasync::bench {
namespace {

/// The benchmark's device as the writer sees it; remembers whether the halves could be registered.
class Watched final : public gpu::Device {
 public:
  explicit Watched(gpu::Device& device) : device_(device) {}

  const std::string& name() const override { return device_.name(); }
  Result<gpu::Memory> allocate(std::uint64_t bytes) override { return device_.allocate(bytes); }
  Result<gpu::Memory> pin(std::uint64_t bytes) override { return device_.pin(bytes); }
  Result<gpu::Memory> register_host(std::byte* data, std::uint64_t bytes, std::shared_ptr<const void> keeper) override {
    auto memory = device_.register_host(data, bytes, std::move(keeper));
    refused_ = refused_ || !memory.ok();
    asked_ = true;
    return memory;
  }
  Result<std::unique_ptr<gpu::Stream>> make_stream() override { return device_.make_stream(); }
  Result<std::unique_ptr<gpu::Stream>> adopt_stream(gpu::StreamHandle handle) override {
    return device_.adopt_stream(handle);
  }
  Result<std::unique_ptr<gpu::Event>> make_event() override { return device_.make_event(); }

  bool registered() const noexcept { return asked_ && !refused_; }

 protected:
  void give_back(gpu::Memory::Kind /*its memory is the device's own*/, std::byte*, std::uint64_t) noexcept override {}

 private:
  gpu::Device& device_;
  bool asked_ = false;
  bool refused_ = false;
};

class Lender final : public DeviceFinder {
 public:
  explicit Lender(gpu::Device& device) : device_(device) {}
  Result<gpu::Device*> find(std::int32_t /*there is one*/) override { return &device_; }

 private:
  gpu::Device& device_;
};

std::vector<SliceSource> sources_of(const Layout& layout, const gpu::Memory& memory, gpu::StreamHandle stream) {
  std::vector<SliceSource> slices;
  for (std::uint32_t t = 0; t < layout.tensors().size(); ++t) {
    const Tensor& tensor = layout.tensors()[t];
    Source source;
    source.data = memory.data() + tensor.offset;
    source.device = {0};
    source.stream = stream.raw;
    slices.push_back({{t, {0, 0, tensor.rows, tensor.cols}}, source});
  }
  return slices;
}

Status check_held(const Writer& writer, const Digest128& root, ThreadPool& pool) {
  const auto held = held_version(writer);
  if (!held) return Error(Errc::internal, "the segment has no version after a commit");
  std::vector<std::uint64_t> digests(writer.layout()->tile_count());
  delta::half_digests(*writer.layout(), held->bytes, digests, pool);
  if (delta::root_digest(digests) == root) return {};
  return Error(Errc::corrupt, to_string(held->version) + ": the half's bytes differ from the device's");
}

}  // namespace

Result<DeviceOffload> offload_from_device(const Options& options, const BenchDevice& device, const OnDevice& model,
                                          ThreadPool& pool) {
  Watched watched(*device.device);
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  WriterOptions writer_options;
  writer_options.agent_socket = agent.socket();
  writer_options.threads = options.threads;
  DS_ASSIGN(const auto writer,
            WriterSession::attach(model.layout, make_sidecar(*model.layout), writer_options,
                                  {std::make_unique<Lender>(watched), {}}, Deadline::after(kDeviceLimit)));
  const std::vector<SliceSource> slices[2] = {sources_of(*model.layout, model.memory[0], device.stream),
                                              sources_of(*model.layout, model.memory[1], device.stream)};
  const std::uint64_t epoch = make_epoch();
  DeviceOffload best;
  // The first version registers the halves, and is not diffed.
  constexpr unsigned kWarmUps = 2;
  for (unsigned i = 0; i < kWarmUps + rounds_of(options); ++i) {
    const Version version{{epoch, i + 1}, "step_" + std::to_string(i + 1)};
    DS_TRY(writer->begin(version, Deadline::after(kDeviceLimit)));
    DS_TRY(writer->write(slices[i % 2]));
    DS_ASSIGN(const OffloadReport report, writer->commit(Deadline::after(kDeviceLimit)));
    DS_TRY(writer->wait_ready(version.id, Deadline::after(kDeviceLimit)));
    DS_TRY(check_held(*writer, model.roots[i % 2], pool));
    if (i < kWarmUps || report.total_s >= best.offload_s) continue;
    best.offload_s = report.total_s;
    best.write_s = report.copy_s;
  }
  best.registered = watched.registered();
  return best;
}

}  // namespace deltasync::bench
