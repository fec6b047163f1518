#include "bench/device_limits.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/deadline.hpp"
#include "delta/mix.hpp"
#include "gpu/cuda_device.hpp"
#include "gpu/fake_device.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kPieceBytes = std::uint64_t{64} << 20;  ///< of one copy
static_assert(kPieceBytes % gpu::SumMemory::kBytes == 0);

/// How much is moved to measure it: the tests' device plays each thread.
struct LimitsAmount {
  unsigned copies;          ///< of a piece, one after the other
  std::uint64_t hbm_bytes;  ///< or the half of it, and so on, as there is room
  std::uint64_t hbm_read;   ///< in one go, so that what a launch costs does not matter
};
constexpr LimitsAmount kLimitsReal{16, std::uint64_t{4} << 30, std::uint64_t{32} << 30};
constexpr LimitsAmount kLimitsFake{1, kPieceBytes, kPieceBytes};

/// Calls work(stream) and waits for it: seconds.
template <class Fn>
Result<double> time_on(gpu::Device& device, const Fn& work) {
  DS_ASSIGN(const auto stream, device.make_stream());
  DS_ASSIGN(const auto event, device.make_event());
  const Stopwatch watch;
  DS_TRY(work(*stream));
  DS_TRY(stream->record(*event));
  DS_TRY(gpu::wait(*event, Deadline::after(kDeviceLimit), "a benchmark's work"));
  return watch.seconds();
}

Result<gpu::Memory> allocate_some(gpu::Device& device, std::uint64_t bytes) {
  for (;; bytes /= 2) {
    auto memory = device.allocate(bytes);
    if (memory || memory.error().code() != Errc::no_space || bytes <= kPieceBytes) return memory;
  }
}

/// What the blocks of a piece add up to.
std::vector<std::uint64_t> block_sums(const gpu::Memory& piece) {
  std::vector<std::uint64_t> sums(piece.bytes() / gpu::SumMemory::kBytes);
  for (std::uint64_t at = 0; at < piece.bytes(); at += sizeof(std::uint64_t)) {
    sums[at / gpu::SumMemory::kBytes] += placement::load_element<std::uint64_t>(piece.data() + at);
  }
  return sums;
}

/// That each byte was read: once more, with sums of its own.
Status check_sums(gpu::Device& device, const gpu::SumMemory& kernel, const gpu::Memory& piece) {
  DS_ASSIGN(const gpu::Memory sums, device.pin(kernel.blocks() * sizeof(std::uint64_t)));
  const auto sum_again = [&](gpu::Stream& stream) -> Status {
    auto* const at = reinterpret_cast<std::byte*>(kernel.sums);
    DS_TRY(stream.zero(at, sums.bytes()));
    DS_TRY(stream.launch(kernel));
    return stream.copy_out(sums.data(), at, sums.bytes());
  };
  DS_TRY(time_on(device, sum_again));
  const auto expected = block_sums(piece);
  for (std::uint64_t i = 0; i < kernel.blocks(); ++i) {
    const auto sum = placement::load_element<std::uint64_t>(sums.data() + i * sizeof(std::uint64_t));
    if (sum == expected[i % expected.size()]) continue;
    return Error(Errc::corrupt, device.name() + ": block " + std::to_string(i) + " of its memory was not read right");
  }
  return {};
}

Status measure_reading(gpu::Device& device, const LimitsAmount& amount, const gpu::Memory& piece, unsigned rounds,
                       BusLimits& best) {
  DS_ASSIGN(const gpu::Memory memory, allocate_some(device, amount.hbm_bytes));
  gpu::SumMemory kernel{memory.data(), memory.bytes(), nullptr};
  DS_ASSIGN(const gpu::Memory sums, device.allocate(kernel.blocks() * sizeof(std::uint64_t)));
  kernel.sums = reinterpret_cast<std::uint64_t*>(sums.data());
  const auto fill = [&](gpu::Stream& stream) -> Status {
    for (std::uint64_t at = 0; at < memory.bytes(); at += kPieceBytes) {
      DS_TRY(stream.copy_in(memory.data() + at, piece.data(), kPieceBytes));
    }
    return {};
  };
  DS_TRY(time_on(device, fill));
  DS_TRY(check_sums(device, kernel, piece));
  const std::uint64_t times = std::max<std::uint64_t>(1, amount.hbm_read / memory.bytes());
  for (unsigned i = 0; i < rounds; ++i) {
    DS_ASSIGN(const double seconds, time_on(device, [&](gpu::Stream& stream) -> Status {
                for (std::uint64_t n = 0; n < times; ++n) DS_TRY(stream.launch(kernel));
                return {};
              }));
    best.hbm_gbps = std::max(best.hbm_gbps, gbps(times * memory.bytes(), seconds));
  }
  best.hbm_bytes = memory.bytes();
  return {};
}

}  // namespace

Result<BenchDevice> open_device(const Options& options) {
  BenchDevice opened;
  opened.fake = options.fake_device;
  if (!opened.fake) {
    DS_ASSIGN(opened.device, gpu::open_cuda_device(0, gpu::Use::kernels));
    return opened;
  }
  gpu::FakeDevice::Options fake;
  fake.seed = options.seed;
  auto device = std::make_unique<gpu::FakeDevice>(fake);
  opened.stream = device->engine_stream();
  opened.device = std::move(device);
  return opened;
}

Result<BusLimits> measure_device(const BenchDevice& of, unsigned rounds) {
  gpu::Device& device = *of.device;
  const LimitsAmount& amount = of.fake ? kLimitsFake : kLimitsReal;
  DS_ASSIGN(const gpu::Memory piece, device.pin(kPieceBytes));
  for (std::uint64_t at = 0; at < kPieceBytes; at += sizeof(std::uint64_t)) {
    placement::store_element(piece.data() + at, delta::mix(at + 1));
  }
  BusLimits best;
  DS_TRY(measure_reading(device, amount, piece, rounds, best));
  DS_ASSIGN(const gpu::Memory memory, device.allocate(kPieceBytes));
  const auto time_copies = [&](const auto& copy) {
    return time_on(device, [&](gpu::Stream& stream) -> Status {
      for (unsigned i = 0; i < amount.copies; ++i) DS_TRY(copy(stream));
      return {};
    });
  };
  for (unsigned i = 0; i < rounds; ++i) {
    DS_ASSIGN(const double in, time_copies([&](gpu::Stream& stream) {
                return stream.copy_in(memory.data(), piece.data(), kPieceBytes);
              }));
    DS_ASSIGN(const double out, time_copies([&](gpu::Stream& stream) {
                return stream.copy_out(piece.data(), memory.data(), kPieceBytes);
              }));
    best.h2d_gbps = std::max(best.h2d_gbps, gbps(amount.copies * kPieceBytes, in));
    best.d2h_gbps = std::max(best.d2h_gbps, gbps(amount.copies * kPieceBytes, out));
  }
  return best;
}

Status upload(gpu::Device& device, std::byte* to, std::span<const std::byte> from) {
  DS_ASSIGN(const gpu::Memory piece, device.pin(std::min<std::uint64_t>(kPieceBytes, from.size())));
  for (std::uint64_t at = 0; at < from.size(); at += piece.bytes()) {
    const std::uint64_t bytes = std::min<std::uint64_t>(piece.bytes(), from.size() - at);
    std::memcpy(piece.data(), from.data() + at, static_cast<std::size_t>(bytes));
    DS_TRY(time_on(device, [&](gpu::Stream& stream) { return stream.copy_in(to + at, piece.data(), bytes); }));
  }
  return {};
}

}  // namespace deltasync::bench
