// How fast bytes come from the agent, and whether fewer of them, which cost time to make and to undo, come sooner. A
// form that is smaller must never slow a fast link down: what is not known is taken for fast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace deltasync::receiver {

/// Of all streams together.
struct LinkRate {
  double bytes_per_s = 0;  ///< 0: fast, or not known

  bool known() const noexcept { return bytes_per_s > 0; }
};

/// The same content in two forms.
struct TwoForms {
  std::uint64_t plain_bytes = 0;
  std::uint64_t smaller_bytes = 0;  ///< an estimate will do
  /// What making and undoing the smaller form takes beyond the plain one, on the threads that do it, while bytes flow:
  /// CPU seconds divided by these threads. The slower of the two ends counts, not their sum.
  double beside_s = 0;
  double before_s = 0;  ///< spent before the first byte can leave
};
/// True if the smaller form is there clearly sooner: by a seventh and a few milliseconds at least.
bool smaller_pays(const TwoForms& forms, LinkRate link) noexcept;

/// True if a delta that changes so many elements of a bf16 model is there sooner in exponent classes. The agent makes
/// them of the whole model before the first byte leaves; a plan waits for them for `patience_s`.
bool classes_pay(std::uint64_t changed, std::uint64_t model_bytes, LinkRate link, double patience_s) noexcept;
/// The longest that an agent lets a plan wait for them (wire_protocol.md "Planning").
inline constexpr double kClassesPatienceS = 10;
/// What a plan that asks for them should allow in all: agents wait for them for half of that. Twice what they are taken
/// to take, and as much again, since the version may come late in it.
double classes_plan_s(std::uint64_t model_bytes) noexcept;

/// Learns the rate from transfers that went before. Bytes count against the time in which the streams waited for bytes
/// and for nothing else, so a pull that is held up by its own digests or its disk shows a link that is fast, and not a
/// slow one. Used by one thread at a time.
class LinkMeter {
 public:
  /// `given_gbps` in gigabits per second is believed as it is; 0: measured.
  explicit LinkMeter(double given_gbps = 0, std::uint64_t sample_bytes = kSampleBytes)
      : given_(given_gbps * 1e9 / 8), sample_bytes_(sample_bytes) {}

  /// A round of a form that costs the agent nothing to make: `waited_s` is the mean over its streams. Few bytes say
  /// more about latency, and are passed over; adding them up would add up what they waited for.
  void add(std::uint64_t bytes, double waited_s) noexcept;
  /// A round in which the streams may have waited for the agent too: the link is at least that fast.
  void at_least(std::uint64_t bytes, double waited_s) noexcept;

  /// The given rate, else the best of the last ones measured: whatever else holds up a stream makes a link look slower
  /// than it is, and nothing makes it look faster than the bytes come. Not known while each measurement is much better
  /// than those before: connections over a long way begin slowly, however fast it is, and grow with what they carry.
  LinkRate rate() const noexcept;
  bool measures() const noexcept { return given_ == 0; }
  /// Another measurement would be news, best one of more bytes: none has said yet that it is no better than before.
  bool wants_sample() const noexcept { return measures() && !settled_; }

  static constexpr std::uint64_t kSampleBytes = 8u << 20;  ///< fewer say more about latency
  /// So much better than before is rising still. Slow start doubles the rate with each doubling of the bytes.
  static constexpr double kRise = 1.5;
  /// A faster one is as good as any: CPUs and memory are the limit then, and those are busy already.
  static constexpr double kFastBytesPerS = 1.6e9;

 private:
  static constexpr std::size_t kSamples = 4;

  double best() const noexcept;
  void keep(double rate) noexcept;

  double given_;
  std::uint64_t sample_bytes_;
  std::array<double, kSamples> rates_{};
  std::size_t samples_ = 0;
  bool rising_ = false;   // the last one was much better than those before
  bool settled_ = false;  // the last one was not, or is fast
};

}  // namespace deltasync::receiver
