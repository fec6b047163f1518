// What nvcc's host code calls, and CUDA Runtime API, "Execution Control". The fat binary has to bring PTX, uncompressed
// (-Xfatbin=-compress=false).
#include <cstring>

#include "tests/gpu/emulator/runtime.hpp"

namespace deltasync::emulator {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, const Function*> by_address;  ///< protected by mutex: of the host's stubs
};
Kernels& kernels() {
  static Kernels* const made = new Kernels;  // registered before main()
  return *made;
}

const Function* kernel_at(const void* address) {
  const std::lock_guard lock(kernels().mutex);
  const auto found = kernels().by_address.find(address);
  return found == kernels().by_address.end() ? nullptr : found->second;
}

template <class T>
T read_at(const unsigned char* from, std::size_t at) {
  T value{};
  std::memcpy(&value, from + at, sizeof value);
  return value;
}

/// The PTX within a fat binary: a header, then entries, each with a header of its own.
std::string_view ptx_in(const unsigned char* binary) {
  constexpr std::uint32_t kMagic = 0xBA55ED50;
  constexpr std::uint16_t kPtx = 1;
  constexpr std::uint64_t kCompressed = 0xA000;
  if (read_at<std::uint32_t>(binary, 0) != kMagic) end_process("a fat binary of another format");
  const unsigned char* entry = binary + read_at<std::uint16_t>(binary, 6);
  const unsigned char* const end = entry + read_at<std::uint64_t>(binary, 8);
  while (entry < end) {
    const auto head = read_at<std::uint32_t>(entry, 4);
    const auto bytes = read_at<std::uint64_t>(entry, 8);
    if (read_at<std::uint16_t>(entry, 0) == kPtx) {
      if ((read_at<std::uint64_t>(entry, 40) & kCompressed) != 0) end_process("compressed PTX is not emulated");
      return {reinterpret_cast<const char*>(entry) + head, static_cast<std::size_t>(bytes)};
    }
    entry += head + bytes;
  }
  end_process("a fat binary without PTX");
}

}  // namespace
}  // namespace deltasync::emulator

using deltasync::emulator::noted;
using deltasync::emulator::runtime;
namespace emulator = deltasync::emulator;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  const auto* const bytes = static_cast<const unsigned char*>(wrapper);
  const auto* const binary = emulator::read_at<const unsigned char*>(bytes, 8);
  auto module = emulator::read_ptx(emulator::ptx_in(binary));
  if (!module.ok()) emulator::end_process(module.error().message());
  return reinterpret_cast<void**>(new emulator::Module(*std::move(module)));  // until the process ends
}
void __cudaRegisterFatBinaryEnd(void** /*module*/) {}
void __cudaUnregisterFatBinary(void** module) {
  delete reinterpret_cast<emulator::Module*>(module);
}
char __cudaInitModule(void** /*module*/) {
  return 1;
}
void __cudaRegisterFunction(void** module, const char* stub, char* /*name*/, const char* name, int /*threads_max*/,
                            uint3* /*tid*/, uint3* /*bid*/, dim3* /*block*/, dim3* /*grid*/, int* /*warp*/) {
  const auto& functions = reinterpret_cast<emulator::Module*>(module)->functions;
  const auto found = functions.find(std::string_view(name));
  if (found == functions.end()) emulator::end_process(std::string("no PTX of ") + name);
  const std::lock_guard lock(emulator::kernels().mutex);
  emulator::kernels().by_address[stub] = &found->second;
}
// Of <<<…>>>, which this project does not use.
cudaError_t __cudaGetKernel(void** /*kernel*/, const void* /*stub*/) {
  emulator::end_process("__cudaGetKernel is not emulated");
}
cudaError_t __cudaLaunchKernel(const void* /*kernel*/, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                               size_t /*shared*/, cudaStream_t /*stream*/) {
  emulator::end_process("__cudaLaunchKernel is not emulated");
}
cudaError_t __cudaPopCallConfiguration(dim3* /*grid*/, dim3* /*block*/, size_t* /*shared*/, void* /*stream*/) {
  emulator::end_process("__cudaPopCallConfiguration is not emulated");
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  const emulator::Function* const function = emulator::kernel_at(stub);
  if (function == nullptr) return noted(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->maxThreadsPerBlock = static_cast<int>(function->threads_max);
  attributes->sharedSizeBytes = function->shared_bytes;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t handle) {
  emulator::ThreadState& thread = emulator::this_thread();
  thread.take_context();
  const emulator::Function* const function = emulator::kernel_at(stub);
  if (function == nullptr) return noted(cudaErrorInvalidDeviceFunction);
  if (grid.y * grid.z * block.y * block.z != 1 || shared != 0) {
    emulator::end_process("launches of more than one dimension, or with dynamic shared memory, are not emulated");
  }
  if (grid.x == 0 || grid.x > 0x7FFFFFFF || block.x == 0 || block.x > function->threads_max) {
    return noted(cudaErrorInvalidConfiguration);
  }
  // "A kernel launch will fail if it is issued to a stream that is not associated to the current device."
  if (runtime().find(handle)->device != thread.device) return noted(cudaErrorInvalidResourceHandle);
  emulator::Launch launch{function, {}, grid.x, block.x, thread.device, runtime().next_seed()};
  launch.parameters.resize(function->parameter_bytes);
  for (std::size_t i = 0; i < function->parameters.size(); ++i) {
    const auto& parameter = function->parameters[i];
    std::memcpy(launch.parameters.data() + parameter.at, arguments[i], parameter.bytes);
  }
  return noted(runtime().submit(handle, [launch = std::move(launch)] {
    emulator::Counts counts;
    const auto fault = emulator::run(launch, runtime().memory(), &counts);
    runtime().count(counts);
    if (fault) runtime().fail(launch.device, *fault);
  }));
}

}  // extern "C"
