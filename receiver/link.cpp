#include "receiver/link.hpp"

#include <algorithm>

namespace deltasync::receiver {

bool smaller_pays(const TwoForms& forms, LinkRate link) noexcept {
  constexpr double kMargin = 1.15;  // neither the rate nor the costs are known to better than that
  constexpr double kLeastS = 0.003;
  if (!link.known() || forms.smaller_bytes >= forms.plain_bytes) return false;
  const double plain_s = static_cast<double>(forms.plain_bytes) / link.bytes_per_s;
  const double move_s = static_cast<double>(forms.smaller_bytes) / link.bytes_per_s;
  const double smaller_s = forms.before_s + std::max(move_s, forms.beside_s);
  return smaller_s * kMargin + kLeastS < plain_s;
}

bool classes_pay(std::uint64_t changed, std::uint64_t model_bytes, LinkRate link) noexcept {
  // docs/benchmarks.md: bits of an element at a density of 1%, and what one thread of a busy virtual machine makes.
  constexpr double kPlainBytes = 10.7 / 8;
  constexpr double kClassBytes = 7.6 / 8;
  constexpr double kMakeBytesPerS = 2.0e9;
  TwoForms forms;
  forms.plain_bytes = static_cast<std::uint64_t>(kPlainBytes * static_cast<double>(changed));
  forms.smaller_bytes = static_cast<std::uint64_t>(kClassBytes * static_cast<double>(changed));
  forms.before_s = static_cast<double>(model_bytes) / kMakeBytesPerS;
  return smaller_pays(forms, link);
}

void LinkMeter::add(std::uint64_t bytes, double waited_s) noexcept {
  bytes_ += bytes;
  waited_s_ += waited_s;
  if (bytes_ < sample_bytes_) return;
  // Who hardly waits is not held up by the link, however fast that is.
  const double shortest_s = static_cast<double>(bytes_) / kFastBytesPerS;
  rates_[samples_++ % kSamples] = static_cast<double>(bytes_) / std::max(waited_s_, shortest_s);
  bytes_ = 0;
  waited_s_ = 0;
}

LinkRate LinkMeter::rate() const noexcept {
  if (!measures()) return {given_};
  const auto known = rates_.begin() + static_cast<std::ptrdiff_t>(std::min(samples_, kSamples));
  if (known == rates_.begin()) return {};
  const double best = *std::max_element(rates_.begin(), known);
  return {best < kFastBytesPerS ? best : 0};
}

}  // namespace deltasync::receiver
