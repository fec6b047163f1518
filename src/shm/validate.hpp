// Checks on a segment that somebody else made, before any of its fields is trusted. Errors name the field.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>

#include "deltasync/result.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

std::uint64_t header_hash(const SegmentHeader& header) noexcept;
/// Of the bytes from layout_offset to the end of the sidecar, in the segment mapped at `base`.
std::uint64_t metadata_hash(const SegmentHeader& header, const std::byte* base) noexcept;

/// A regular file of this user with mode 0600 and room for a control block: checked before it is mapped.
Status check_file(const struct stat& st);

/// The control block mapped at `base`, whose file has `file_bytes` (≥ kControlBytes): ready word, header hash, every
/// offset against the file's size, metadata hash, and each state, phase and label by itself. Words that change
/// together are not compared, since others may be changing them right now.
Status check_control(const std::byte* base, std::uint64_t file_bytes);

}  // namespace deltasync::shm
