// A model version: which trainer incarnation, which step of it, and what the user calls it.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace deltasync {

/// Longest label in bytes (UTF-8), so that it fits the segment's fixed field.
inline constexpr std::size_t kLabelBytesMax = 127;

/// What orders versions. `epoch` identifies one trainer incarnation: 44 bits of Unix milliseconds, then
/// 20 random bits, so that a later incarnation has a larger epoch. `number` grows within an epoch.
struct VersionId {
  std::uint64_t epoch = 0;
  std::uint64_t number = 0;

  auto operator<=>(const VersionId&) const = default;
  /// Epoch 0 is never created: it means "no version".
  bool valid() const noexcept { return epoch != 0; }
};

/// A version with the user's name for it ("global_step_1200"; may be empty).
struct Version {
  VersionId id;
  std::string label;

  bool operator==(const Version&) const = default;
};

/// A fresh epoch from the real-time clock and the system's random source. One rank calls it and hands the
/// value to all other writers of the job.
std::uint64_t make_epoch();

/// "global_step_1200 (e18c…:12)" for people.
std::string to_string(const Version& version);
/// "e18c0a1b2c3d4e5f:12"
std::string to_string(const VersionId& id);

}  // namespace deltasync
