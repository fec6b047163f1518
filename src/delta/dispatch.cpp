// Which kernels run: chosen once from the CPU, or forced by the environment.
#ifdef DELTASYNC_X86_KERNELS
#include <cpuid.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "delta/delta.hpp"
#include "delta/kernels.hpp"

namespace deltasync::delta {

namespace {

#ifdef DELTASYNC_X86_KERNELS
/// clang 14 does not know __builtin_cpu_supports("lzcnt").
bool cpu_has_lzcnt() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & bit_LZCNT) != 0;
}
// Each asks for every instruction set that its file is compiled for (CMakeLists.txt).
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi") != 0 &&
         __builtin_cpu_supports("bmi2") != 0 && cpu_has_lzcnt() && __builtin_cpu_supports("popcnt") != 0;
}
// VBMI2 has the compress instructions for bytes and 16-bit elements; CPUs without it use AVX2.
bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("avx512vbmi2") != 0;
}
#endif

const Kernels& choose() {
  const char* forced = std::getenv("DELTASYNC_ISA");
  if (forced != nullptr && *forced != '\0') {
    if (const Kernels* kernels = find_kernels(forced)) return *kernels;
    std::fprintf(
        stderr,
        "deltasync: DELTASYNC_ISA=%s is unknown or not available here (scalar, avx2, avx512 and neon are known)\n",
        forced);
    std::_Exit(1);
  }
  for (const char* name : {"avx512", "avx2", "neon"}) {
    if (const Kernels* kernels = find_kernels(name)) return *kernels;
  }
  return scalar_kernels();
}

}  // namespace

const Kernels* find_kernels(const char* name) {
  if (std::strcmp(name, "scalar") == 0) return &scalar_kernels();
#ifdef DELTASYNC_X86_KERNELS
  if (std::strcmp(name, "avx2") == 0 && cpu_has_avx2()) return &avx2_kernels();
  if (std::strcmp(name, "avx512") == 0 && cpu_has_avx512()) return &avx512_kernels();
#endif
#ifdef DELTASYNC_NEON_KERNELS
  if (std::strcmp(name, "neon") == 0) return &neon_kernels();
#endif
  return nullptr;
}

const Kernels& active_kernels() {
  static const Kernels& kernels = choose();
  return kernels;
}

const char* isa_name() {
  return active_kernels().name;
}

}  // namespace deltasync::delta
