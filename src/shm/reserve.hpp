// Taking all memory of a new segment at once: huge pages where there are any, on home nodes where it has
// some.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/home_nodes.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

/// Bytes [begin, end) of a segment's file, and the home of their memory.
struct FilePart {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  unsigned home = 0;
};
/// All of the file, in order: what stands before the halves, and each half's stripes.
std::vector<FilePart> parts_of(const SegmentPlan& plan, const HomeNodes& home_nodes);

/// Every page of the file, mapped at `base` and touched by nobody yet, so that a full file system is an error here and
/// never a SIGBUS later. With home nodes each home's parts are taken by a thread of their own, which runs on that home
/// and prefers its memory: pages come from where the thread that takes them runs even where memory policies are
/// refused. An errno, or 0.
int reserve_file(int fd, std::byte* base, const SegmentPlan& plan, const HomeNodes* home_nodes);

}  // namespace deltasync::shm
