// Marks functions that run on the host and, compiled by nvcc, on a device too: what a kernel's thread does is such a
// function, so that it can be tested without one.
#pragma once

#ifdef __CUDACC__
#define DS_HD __host__ __device__
#else
#define DS_HD
#endif
