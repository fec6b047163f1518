#include "delta/dense_scalar.hpp"

namespace deltasync::delta {

DenseKernels scalar_dense_kernels() {
  return dense_kernels();
}

}  // namespace deltasync::delta
