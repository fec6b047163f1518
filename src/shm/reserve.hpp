// Taking all memory of a new segment at once: huge pages where there are any, on the nodes of a placement where it has
// some.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/numa_placement.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

/// Bytes [begin, end) of a segment's file, and the node of their memory.
struct FilePart {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  unsigned node = 0;
};
/// All of the file, in order: what stands before the halves, and each half's stripes.
std::vector<FilePart> parts_of(const SegmentPlan& plan, const NumaPlacement& numa_placement);

/// Every page of the file, mapped at `base` and touched by nobody yet, so that a full file system is an error here and
/// never a SIGBUS later. With a placement each node's parts are taken by a thread of their own, which runs on that node
/// and prefers its memory: pages come from where the thread that takes them runs even where memory policies are
/// refused. An errno, or 0.
int reserve_file(int fd, std::byte* base, const SegmentPlan& plan, const NumaPlacement* numa_placement);

}  // namespace deltasync::shm
