// Whether a segment's file can have lost pages while nobody had it. What lives in memory ends with the boot of the
// machine; on a disk a file outlives it, and after a power loss pages that had not been written back are as they were
// before, or zero, while others say that the version is whole.
#pragma once

namespace deltasync::shm {

/// Says in an attribute of the file which boot made it. Where the file system has no attributes the file stays
/// unmarked.
void mark_boot(int file) noexcept;

/// True if the file lives in memory, or this boot made it.
bool is_of_this_boot(int file) noexcept;

}  // namespace deltasync::shm
