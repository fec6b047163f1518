#include "shm/validate.hpp"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>

#include "base/hash.hpp"
#include "base/user.hpp"

namespace deltasync::shm {
namespace {

std::uint64_t read(const std::uint64_t& word) noexcept {
  return std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(word)).load();
}

Error bad(const std::string& field, const std::string& why) {
  return {Errc::corrupt, field + ": " + why};
}

Status check_header(const SegmentHeader& header, std::uint64_t file_bytes) {
  if (header.magic != kSegmentMagic) return bad("magic", "this is no deltasync segment");
  if (header.format != kSegmentFormat) {
    return Error(Errc::unsupported, "format: segment format " + std::to_string(header.format) + ", this build knows " +
                                        std::to_string(kSegmentFormat));
  }
  if (header.header_hash != header_hash(header)) return bad("header_hash", "the header was changed or damaged");
  if (header.control_bytes != kControlBytes) return bad("control_bytes", std::to_string(header.control_bytes));
  const auto plan = plan_segment(header.half_bytes, header.layout_bytes, header.sidecar_bytes, header.progress_words);
  if (!plan) return bad("half_bytes", "sizes beyond the limits");
  if (header.layout_offset != plan->layout_offset) return bad("layout_offset", std::to_string(header.layout_offset));
  if (header.sidecar_offset != plan->sidecar_offset)
    return bad("sidecar_offset", std::to_string(header.sidecar_offset));
  if (header.progress_offset != plan->progress_offset)
    return bad("progress_offset", std::to_string(header.progress_offset));
  for (unsigned h = 0; h < kHalves; ++h) {
    if (header.half_offset[h] != plan->half_offset[h]) {
      return bad("half_offset[" + std::to_string(h) + "]", std::to_string(header.half_offset[h]));
    }
  }
  if (header.segment_bytes != plan->segment_bytes) return bad("segment_bytes", std::to_string(header.segment_bytes));
  if (header.segment_bytes != file_bytes) {
    return bad("segment_bytes", "the file has " + std::to_string(file_bytes) + " bytes, the header says " +
                                    std::to_string(header.segment_bytes));
  }
  return {};
}

Status check_half(const ControlBlock& block, unsigned h) {
  const auto field = "state[" + std::to_string(h) + "]";
  const auto word = read(block.state[h].word);
  if (!is_half_state(word >> 56)) return bad(field, "no such state: " + std::to_string(word >> 56));
  const auto half = HalfWord::unpack(word);
  const bool has_info = half.code != HalfState::free && half.code != HalfState::quarantined;
  if (!has_info) return {};
  const auto info = "info[" + std::to_string(h) + "]";
  const auto& words = block.info[h].words;
  const auto epoch = read(words[kInfoEpoch]);
  const auto writers = read(words[kInfoWriters]);
  char label[kInfoLabelWords * sizeof(std::uint64_t)];
  for (unsigned w = 0; w < kInfoLabelWords; ++w) {
    const auto part = read(words[kInfoLabel + w]);
    std::memcpy(label + w * sizeof(part), &part, sizeof(part));
  }
  if (read(block.state[h].word) != word) return {};  // it moved on while we looked: nothing to compare with
  if (epoch == 0) return bad(info + ".epoch", "0 in state " + std::string(to_string(half.code)));
  if (writers == 0 || writers > kSlotsMax) return bad(info + ".writers", std::to_string(writers));
  if (label[sizeof(label) - 1] != 0) return bad(info + ".label", "not terminated");
  if (half.sequence == 0) return bad(field, "sequence 0 in state " + std::string(to_string(half.code)));
  return {};
}

}  // namespace

std::uint64_t header_hash(const SegmentHeader& header) noexcept {
  return xxh3_64(ByteSpan(reinterpret_cast<const std::byte*>(&header), offsetof(SegmentHeader, header_hash)));
}

std::uint64_t metadata_hash(const SegmentHeader& header, const std::byte* base) noexcept {
  const auto end = header.sidecar_offset + header.sidecar_bytes;
  return xxh3_64(ByteSpan(base + header.layout_offset, end - header.layout_offset));
}

Status check_file(const struct stat& st) {
  if (!S_ISREG(st.st_mode)) return Error(Errc::corrupt, "not a regular file");
  if (st.st_uid != ::geteuid()) {
    return Error(Errc::permission, "belongs to " + describe_user(st.st_uid) + ", not to " + describe_user(::geteuid()));
  }
  if ((st.st_mode & 07777) != 0600) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(st.st_mode & 07777));
    return Error(Errc::permission, "mode is " + std::string(mode) + ", must be 0600");
  }
  if (static_cast<std::uint64_t>(st.st_size) < kControlBytes) {
    return bad("file size", std::to_string(st.st_size) + " bytes is less than a control block");
  }
  return {};
}

Status check_control(const std::byte* base, std::uint64_t file_bytes) {
  const auto& block = *reinterpret_cast<const ControlBlock*>(base);
  // SYNC POINT ready (acquire): pairs with the last store of Segment::create.
  const auto ready = read(block.ready.word);
  if (ready == 0) return bad("ready", "the segment was never finished");
  if (ready != kSegmentReady) return bad("ready", "not the ready word");
  DS_TRY(check_header(block.header, file_bytes));
  if (block.header.metadata_hash != metadata_hash(block.header, base)) {
    return bad("metadata_hash", "layout or sidecar was changed or damaged");
  }
  for (const auto word : block.header.reserved) {
    if (word != 0) return bad("header.reserved", "not zero");
  }
  for (unsigned h = 0; h < kHalves; ++h) DS_TRY(check_half(block, h));
  for (unsigned k = 0; k < kSlotsMax; ++k) {
    const auto phase = read(block.slot[k].phase);
    if (!is_phase(phase >> 56)) return bad("slot[" + std::to_string(k) + "].phase", std::to_string(phase >> 56));
    if (read(block.owner[k].pid) > 0x7fffffff) return bad("owner[" + std::to_string(k) + "].pid", "no pid");
  }
  return {};
}

}  // namespace deltasync::shm
