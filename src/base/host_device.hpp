// Marks functions that run on the host and, compiled by nvcc, on a device too: what a kernel's thread does is such a
// function, so that it can be tested without one.
#pragma once

#ifdef __CUDACC__
#define DS_HD __host__ __device__
#else
#define DS_HD
#endif

/// Before a loop of a known length, whose loads a device may then begin together.
#ifdef __CUDA_ARCH__
#define DS_UNROLL _Pragma("unroll")
#else
#define DS_UNROLL
#endif
