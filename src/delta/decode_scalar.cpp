#include "delta/decode_scalar.hpp"

namespace deltasync::delta {

namespace {
struct Isa {
  static constexpr auto positions = positions_scalar;
  template <class U>
  static constexpr auto unit_values = unit_values_scalar<U>;
  template <class U, ValueKind kKind>
  static constexpr auto resolve = resolve_scalar<U, kKind>;
};

}  // namespace

DecodeKernels scalar_decode_kernels() {
  return decode_kernels<Isa>();
}

}  // namespace deltasync::delta
