// Between Version and the words of a half's info.
#pragma once

#include <cstring>

#include "deltasync/version.hpp"
#include "shm/protocol.hpp"

namespace deltasync::shm {

/// The label has at most kLabelBytesMax bytes (checked by the caller).
inline InfoWords to_words(const Version& version, unsigned writers) {
  InfoWords words{};
  words[kInfoEpoch] = version.id.epoch;
  words[kInfoNumber] = version.id.number;
  words[kInfoWriters] = writers;
  std::memcpy(&words[kInfoLabel], version.label.data(), version.label.size());
  return words;
}

inline Version to_version(const InfoWords& words) {
  char label[kInfoLabelWords * sizeof(std::uint64_t)];
  std::memcpy(label, &words[kInfoLabel], sizeof(label));
  label[sizeof(label) - 1] = 0;
  return {version_of(words), std::string(label)};
}
static_assert(kLabelBytesMax < kInfoLabelWords * sizeof(std::uint64_t));

}  // namespace deltasync::shm
