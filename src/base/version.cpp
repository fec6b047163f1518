#include "deltasync/version.hpp"

#include <cstdio>
#include <random>

namespace deltasync {
namespace {

constexpr unsigned kRandomBits = 32;
constexpr std::uint64_t kCountMax = ~std::uint64_t{0} >> kRandomBits;

}  // namespace

std::uint64_t make_epoch(std::uint64_t after) {
  const std::uint64_t before = after >> kRandomBits;
  const std::uint64_t count = before == kCountMax ? 1 : before + 1;
  std::random_device random;
  return count << kRandomBits | (random() & 0xFFFFFFFF);
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
