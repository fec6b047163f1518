#include "delta/decode_scalar.hpp"

namespace deltasync::delta {

namespace {
template <class U>
constexpr auto kDifference = resolve_scalar<U, ValueKind::difference>;
template <class U>
constexpr auto kUlpDifference = resolve_scalar<U, ValueKind::ulp_difference>;
template <class U>
constexpr auto kElement = resolve_scalar<U, ValueKind::element>;
}  // namespace

DecodeKernels scalar_decode_kernels() {
  using std::uint16_t;
  using std::uint32_t;
  using std::uint64_t;
  using std::uint8_t;
  return {
      .count_ones = count_ones_scalar,
      .positions = positions_scalar,
      .unit_values = {unit_values_scalar<uint8_t>, unit_values_scalar<uint16_t>, unit_values_scalar<uint32_t>,
                      unit_values_scalar<uint64_t>},
      .magnitudes = {magnitudes_scalar<uint8_t>, magnitudes_scalar<uint16_t>, magnitudes_scalar<uint32_t>,
                     magnitudes_scalar<uint64_t>},
      .resolve = {{kDifference<uint8_t>, kUlpDifference<uint8_t>, kElement<uint8_t>},
                  {kDifference<uint16_t>, kUlpDifference<uint16_t>, kElement<uint16_t>},
                  {kDifference<uint32_t>, kUlpDifference<uint32_t>, kElement<uint32_t>},
                  {kDifference<uint64_t>, kUlpDifference<uint64_t>, kElement<uint64_t>}},
  };
}

}  // namespace deltasync::delta
