// Between Version and the words of a half's info.
#pragma once

#include <cstring>
#include <string>
#include <utility>

#include "base/utf8.hpp"
#include "deltasync/version.hpp"
#include "shm/protocol.hpp"

namespace deltasync::shm {

/// The label has passed check_label().
inline InfoWords to_words(const Version& version, unsigned writers) {
  InfoWords words{};
  words[kInfoEpoch] = version.id.epoch;
  words[kInfoNumber] = version.id.number;
  words[kInfoWriters] = writers;
  std::memcpy(&words[kInfoLabel], version.label.data(), version.label.size());
  return words;
}

/// A label that is no plain text (writers of protocol 4 take any) becomes such text, and is cut where that is too long:
/// receivers refuse a message with another one.
inline Version to_version(const InfoWords& words) {
  char label[kInfoLabelWords * sizeof(std::uint64_t)];
  std::memcpy(label, &words[kInfoLabel], sizeof(label));
  label[sizeof(label) - 1] = 0;
  std::string text = printable(label);
  while (text.size() > kLabelBytesMax || !is_utf8(text)) text.pop_back();
  return {version_of(words), std::move(text)};
}
static_assert(kLabelBytesMax < kInfoLabelWords * sizeof(std::uint64_t));

}  // namespace deltasync::shm
