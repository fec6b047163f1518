// A model version: which incarnation of a trainer, which step of it, and what the user calls it.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace deltasync {

/// Longest label in bytes (UTF-8), so that it fits the segment's fixed field.
inline constexpr std::size_t kLabelBytesMax = 127;

/// What names a version.
struct VersionId {
  /// One incarnation of a trainer: 32 bits that count, then 32 random ones, so that the epochs of two trainers that
  /// never heard of each other differ. A later incarnation has a larger epoch as far as its agent has heard of the
  /// earlier ones; nothing that must hold depends on that. 0 is never created.
  std::uint64_t epoch = 0;
  std::uint64_t number = 0;  ///< grows within an epoch

  auto operator<=>(const VersionId&) const = default;
  /// False: "no version".
  bool valid() const noexcept { return epoch != 0; }
};

/// A version with the user's name for it ("global_step_1200"), which may be empty.
struct Version {
  VersionId id;
  std::string label;  ///< UTF-8, at most kLabelBytesMax bytes; of digits alone only if it is the number

  bool operator==(const Version&) const = default;
};

/// A new epoch: one more than `after` in the counting bits (from the beginning again where they are used up), and bits
/// of the system's random source. No clock is in it. Trainers ask Writer::fresh_epoch(), which knows what to come
/// after.
std::uint64_t make_epoch(std::uint64_t after = 0);

/// "global_step_1200 (e18c…:12)", for people.
std::string to_string(const Version& version);
/// "e18c0a1b2c3d4e5f:12"
std::string to_string(const VersionId& id);

}  // namespace deltasync
