#include "delta/dense_scalar.hpp"

namespace deltasync::delta {

DenseKernels avx512_dense_kernels() {
  return dense_kernels();
}

}  // namespace deltasync::delta
