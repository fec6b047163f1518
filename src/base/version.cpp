#include "deltasync/version.hpp"

#include <chrono>
#include <cstdio>
#include <random>

namespace deltasync {

std::uint64_t make_epoch() {
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  std::random_device random;
  return (static_cast<std::uint64_t>(ms) << 20) | (random() & 0xFFFFF);
}

std::string to_string(const VersionId& id) {
  char text[48];
  std::snprintf(text, sizeof(text), "%016llx:%llu", static_cast<unsigned long long>(id.epoch),
                static_cast<unsigned long long>(id.number));
  return text;
}

std::string to_string(const Version& version) {
  return version.label.empty() ? to_string(version.id) : version.label + " (" + to_string(version.id) + ")";
}

}  // namespace deltasync
