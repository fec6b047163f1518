#include "delta/dense_scalar.hpp"

namespace deltasync::delta {

DenseKernels avx2_dense_kernels() {
  return dense_kernels();
}

}  // namespace deltasync::delta
