#include "receiver/link.hpp"

#include <algorithm>

namespace deltasync::receiver {
namespace {

/// Who hardly waits is not held up by the link, however fast that is.
double rate_of(std::uint64_t bytes, double waited_s) noexcept {
  const auto moved = static_cast<double>(bytes);
  return waited_s * LinkMeter::kFastBytesPerS <= moved ? LinkMeter::kFastBytesPerS : moved / waited_s;
}

/// What making the classes of a model takes one thread of a busy virtual machine (benchmarks.md).
double classes_make_s(std::uint64_t model_bytes) noexcept {
  constexpr double kMakeBytesPerS = 2.0e9;
  return static_cast<double>(model_bytes) / kMakeBytesPerS;
}

}  // namespace

bool smaller_pays(const TwoForms& forms, LinkRate link) noexcept {
  constexpr double kMargin = 1.15;  // neither the rate nor the costs are known to better than that
  constexpr double kLeastS = 0.003;
  if (!link.known() || forms.smaller_bytes >= forms.plain_bytes) return false;
  const double plain_s = static_cast<double>(forms.plain_bytes) / link.bytes_per_s;
  const double move_s = static_cast<double>(forms.smaller_bytes) / link.bytes_per_s;
  const double smaller_s = forms.before_s + std::max(move_s, forms.beside_s);
  return smaller_s * kMargin + kLeastS < plain_s;
}

bool classes_pay(std::uint64_t changed, std::uint64_t model_bytes, LinkRate link, double patience_s) noexcept {
  // benchmarks.md: bits of an element at a density of 1%.
  constexpr double kPlainBytes = 10.7 / 8;
  constexpr double kClassBytes = 7.6 / 8;
  TwoForms forms;
  forms.plain_bytes = static_cast<std::uint64_t>(kPlainBytes * static_cast<double>(changed));
  forms.smaller_bytes = static_cast<std::uint64_t>(kClassBytes * static_cast<double>(changed));
  forms.before_s = classes_make_s(model_bytes);
  return forms.before_s <= patience_s && smaller_pays(forms, link);
}

double classes_plan_s(std::uint64_t model_bytes) noexcept {
  return 4 * std::min(classes_make_s(model_bytes), kClassesPatienceS);
}

void LinkMeter::add(std::uint64_t bytes, double waited_s) noexcept {
  if (bytes < sample_bytes_) return;
  const double rate = rate_of(bytes, waited_s);
  rising_ = samples_ != 0 && rate > kRise * best();
  settled_ = rate >= kFastBytesPerS || (samples_ != 0 && !rising_);
  keep(rate);
}

void LinkMeter::at_least(std::uint64_t bytes, double waited_s) noexcept {
  if (samples_ == 0 || bytes < sample_bytes_) return;
  if (const double rate = rate_of(bytes, waited_s); rate > best()) keep(rate);
}

void LinkMeter::keep(double rate) noexcept {
  rates_[samples_++ % kSamples] = rate;
}

double LinkMeter::best() const noexcept {
  return *std::max_element(rates_.begin(), rates_.begin() + static_cast<std::ptrdiff_t>(std::min(samples_, kSamples)));
}

LinkRate LinkMeter::rate() const noexcept {
  if (!measures()) return {given_};
  if (samples_ == 0 || rising_) return {};
  return {best() < kFastBytesPerS ? best() : 0};
}

}  // namespace deltasync::receiver
