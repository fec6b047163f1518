#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "deltasync/export.hpp"

namespace deltasync {
namespace {

float bf16_value(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// To the nearest, ties to even; a NaN stays one.
std::uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float value_of(float element) {
  return element;
}
float value_of(std::uint16_t element) {
  return bf16_value(element);
}
template <class T>
T element_of(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return bf16_bits(value);
  }
}

/// Calls `each(source, target)` where each run of the innermost step begins.
template <class F>
void walk(std::span<const CopyStep> steps, std::uint64_t source, std::uint64_t target, F&& each) {
  if (steps.size() <= 1) {
    each(source, target);
    return;
  }
  for (std::uint64_t i = 0; i < steps.front().count; ++i) {
    walk(steps.subspan(1), source + i * steps.front().source_stride, target + i * steps.front().target_stride, each);
  }
}

template <class From, class To>
void convert(const ExportCopy& copy, const std::byte* source, std::byte* target) {
  const CopyStep inner = copy.steps.empty() ? CopyStep{} : copy.steps.back();
  const auto add = static_cast<float>(copy.add);
  walk(copy.steps, copy.source_offset, copy.target_offset, [&](std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t i = 0; i < inner.count; ++i) {
      From element{};
      std::memcpy(&element, source + (from + i * inner.source_stride) * sizeof(From), sizeof(From));
      const float value = value_of(element);
      const To made = element_of<To>(add == 0 ? value : value + add);  // -0 stays -0
      std::memcpy(target + (to + i * inner.target_stride) * sizeof(To), &made, sizeof(To));
    }
  });
}

void move(const ExportCopy& copy, std::size_t width, const std::byte* source, std::byte* target) {
  const CopyStep inner = copy.steps.empty() ? CopyStep{} : copy.steps.back();
  walk(copy.steps, copy.source_offset, copy.target_offset, [&](std::uint64_t from, std::uint64_t to) {
    if (inner.source_stride == 1 && inner.target_stride == 1) {
      std::memcpy(target + to * width, source + from * width, inner.count * width);
      return;
    }
    for (std::uint64_t i = 0; i < inner.count; ++i) {
      std::memcpy(target + (to + i * inner.target_stride) * width, source + (from + i * inner.source_stride) * width,
                  width);
    }
  });
}

/// Whether the elements of a side are among the first `size`.
bool fits(std::uint64_t offset, std::span<const CopyStep> steps, std::uint64_t CopyStep::*stride, std::uint64_t size) {
  std::uint64_t last = offset;
  for (const CopyStep& step : steps) {
    std::uint64_t reach = 0;
    if (__builtin_mul_overflow(step.count - 1, step.*stride, &reach) || __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return last < size;
}

}  // namespace

std::uint64_t ExportCopy::elements() const {
  std::uint64_t count = 1;
  for (const CopyStep& step : steps) count *= step.count;
  return count;
}

Status apply_on_host(const ExportPlan& plan, const ExportCopy& copy, Dtype source_dtype,
                     std::span<const std::byte> source, std::span<std::byte> target) {
  if (copy.tensor >= plan.layout->tensors().size()) return Error(Errc::out_of_range, "a copy to no tensor of the plan");
  const Tensor& tensor = plan.layout->tensors()[copy.tensor];
  const Dtype to = tensor.spec.dtype;
  if (std::any_of(copy.steps.begin(), copy.steps.end(), [](const CopyStep& step) { return step.count == 0; }))
    return {};
  const std::size_t width = std::max<std::size_t>(dtype_bytes(source_dtype), 1);  // of no dtype: below
  if (!fits(copy.source_offset, copy.steps, &CopyStep::source_stride, source.size() / width) ||
      !fits(copy.target_offset, copy.steps, &CopyStep::target_stride, target.size() / dtype_bytes(to))) {
    return Error(Errc::out_of_range, tensor.spec.name + ": the memory is smaller than what the plan speaks of");
  }
  if (source_dtype == to && copy.add == 0) {
    move(copy, dtype_bytes(to), source.data(), target.data());
  } else if (source_dtype == Dtype::f32 && to == Dtype::bf16) {
    convert<float, std::uint16_t>(copy, source.data(), target.data());
  } else if (source_dtype == Dtype::bf16 && to == Dtype::f32) {
    convert<std::uint16_t, float>(copy, source.data(), target.data());
  } else if (source_dtype == Dtype::f32 && to == Dtype::f32) {
    convert<float, float>(copy, source.data(), target.data());
  } else if (source_dtype == Dtype::bf16 && to == Dtype::bf16) {
    convert<std::uint16_t, std::uint16_t>(copy, source.data(), target.data());
  } else if (to == Dtype::f8_e4m3) {
    return Error(Errc::unsupported,
                 tensor.spec.name + " is quantised, block by block: of the values of all its copies");
  } else {
    return Error(Errc::unsupported, "no cast from " + std::string(to_string(source_dtype)) + " to " +
                                        std::string(to_string(to)) + " of " + tensor.spec.name);
  }
  return {};
}

}  // namespace deltasync
