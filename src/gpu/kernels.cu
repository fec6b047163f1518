#include "gpu/cuda_launch.hpp"

namespace deltasync::gpu {
namespace {

constexpr std::uint64_t kBlocksMax = 0x7FFFFFFF;  ///< of a grid

template <class K>
__global__ void __launch_bounds__(kBlockThreads) run_blocks(const K kernel, std::uint64_t first) {
  kernel.run(first + blockIdx.x, threadIdx.x);
}

/// One addition in memory for each warp.
template <class K>
__global__ void __launch_bounds__(kBlockThreads) sum_blocks(const K kernel, std::uint64_t first) {
  const std::uint64_t block = first + blockIdx.x;
  unsigned long long sum = kernel.sum(block, threadIdx.x);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, lanes);
  if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(reinterpret_cast<unsigned long long*>(kernel.sum_of(block)), sum);
}

template <class K>
cudaError_t launch_grids(void (*function)(K, std::uint64_t), const K& kernel, cudaStream_t stream) {
  for (std::uint64_t first = 0; first < kernel.blocks(); first += kBlocksMax) {
    const std::uint64_t left = kernel.blocks() - first;
    const dim3 grid(static_cast<unsigned>(left < kBlocksMax ? left : kBlocksMax));
    // Not by <<<>>>, whose error is the last one of the thread: it may be an engine's.
    void* arguments[] = {const_cast<K*>(&kernel), &first};
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void*>(function), grid, dim3(kBlockThreads), arguments, 0, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t load_kernels() {
  const void* const all[] = {
      reinterpret_cast<const void*>(run_blocks<MoveTiles>),   reinterpret_cast<const void*>(run_blocks<ExchangeWords>),
      reinterpret_cast<const void*>(sum_blocks<DigestTiles>), reinterpret_cast<const void*>(sum_blocks<ResolveWords>),
      reinterpret_cast<const void*>(sum_blocks<SumMemory>),   reinterpret_cast<const void*>(run_blocks<GatherMatrix>),
  };
  for (const void* const function : all) {
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch(const MoveTiles& kernel, cudaStream_t stream) {
  return launch_grids<MoveTiles>(run_blocks<MoveTiles>, kernel, stream);
}
cudaError_t launch(const ExchangeWords& kernel, cudaStream_t stream) {
  return launch_grids<ExchangeWords>(run_blocks<ExchangeWords>, kernel, stream);
}
cudaError_t launch(const DigestTiles& kernel, cudaStream_t stream) {
  return launch_grids<DigestTiles>(sum_blocks<DigestTiles>, kernel, stream);
}
cudaError_t launch(const ResolveWords& kernel, cudaStream_t stream) {
  return launch_grids<ResolveWords>(sum_blocks<ResolveWords>, kernel, stream);
}
cudaError_t launch(const SumMemory& kernel, cudaStream_t stream) {
  return launch_grids<SumMemory>(sum_blocks<SumMemory>, kernel, stream);
}
cudaError_t launch(const GatherMatrix& kernel, cudaStream_t stream) {
  return launch_grids<GatherMatrix>(run_blocks<GatherMatrix>, kernel, stream);
}

}  // namespace deltasync::gpu
