// Between cuda_device.cpp, which any C++ compiler takes, and kernels.cu, which needs nvcc and many minutes for each
// line too many: kernels are launched there, and nothing else.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels.hpp"

namespace deltasync::gpu {

/// Loads all kernels to the current device. Else the first launch of each does, which may wait for all that runs there:
/// an engine's kernel that does not end would hold up a commit beyond its deadline.
cudaError_t load_kernels();

/// With at least one block, on the current device.
cudaError_t launch(const MoveTiles& kernel, cudaStream_t stream);
cudaError_t launch(const ExchangeWords& kernel, cudaStream_t stream);
cudaError_t launch(const DigestTiles& kernel, cudaStream_t stream);
cudaError_t launch(const ResolveWords& kernel, cudaStream_t stream);
cudaError_t launch(const SumMemory& kernel, cudaStream_t stream);
cudaError_t launch(const GatherMatrix& kernel, cudaStream_t stream);

}  // namespace deltasync::gpu
