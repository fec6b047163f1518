#include <array>

#include "deltasync/layout.hpp"

namespace deltasync {
namespace {

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::uint8_t bytes;
  bool is_float;
  std::uint8_t packed = 1;
};

constexpr std::array<DtypeRow, 20> kDtypes = {{
    {Dtype::f64, "F64", 8, true},
    {Dtype::f32, "F32", 4, true},
    {Dtype::f16, "F16", 2, true},
    {Dtype::bf16, "BF16", 2, true},
    {Dtype::f8_e4m3, "F8_E4M3", 1, true},
    {Dtype::f8_e5m2, "F8_E5M2", 1, true},
    {Dtype::i64, "I64", 8, false},
    {Dtype::i32, "I32", 4, false},
    {Dtype::i16, "I16", 2, false},
    {Dtype::i8, "I8", 1, false},
    {Dtype::u8, "U8", 1, false},
    {Dtype::boolean, "BOOL", 1, false},
    {Dtype::u16, "U16", 2, false},
    {Dtype::u32, "U32", 4, false},
    {Dtype::u64, "U64", 8, false},
    {Dtype::f8_e8m0, "F8_E8M0", 1, false},  // an exponent without sign: as it stands it is in order
    {Dtype::f8_e4m3fnuz, "F8_E4M3FNUZ", 1, true},
    {Dtype::f8_e5m2fnuz, "F8_E5M2FNUZ", 1, true},
    {Dtype::c64, "C64", 8, false},
    {Dtype::f4, "F4", 1, false, 2},
}};

const DtypeRow* row_of(Dtype dtype) noexcept {
  const auto value = static_cast<std::size_t>(dtype);
  return value >= 1 && value <= kDtypes.size() ? &kDtypes[value - 1] : nullptr;
}

constexpr bool rows_are_in_value_order() {
  for (std::size_t i = 0; i < kDtypes.size(); ++i) {
    if (static_cast<std::size_t>(kDtypes[i].dtype) != i + 1) return false;
  }
  return true;
}
static_assert(rows_are_in_value_order());

}  // namespace

std::size_t dtype_bytes(Dtype dtype) noexcept {
  const auto* row = row_of(dtype);
  return row == nullptr ? 0 : row->bytes;
}

std::size_t dtype_packed(Dtype dtype) noexcept {
  const auto* row = row_of(dtype);
  return row == nullptr ? 1 : row->packed;
}

bool dtype_is_float(Dtype dtype) noexcept {
  const auto* row = row_of(dtype);
  return row != nullptr && row->is_float;
}

std::string_view to_string(Dtype dtype) noexcept {
  const auto* row = row_of(dtype);
  return row == nullptr ? "unknown" : row->name;
}

std::optional<Dtype> dtype_from_string(std::string_view name) noexcept {
  for (const auto& row : kDtypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace deltasync
