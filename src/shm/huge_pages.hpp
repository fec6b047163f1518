// Huge pages for files in memory that the system does not give them to by itself (MADV_HUGEPAGE has no effect on shared
// memory where shmem_enabled is "never", which is the default; MADV_COLLAPSE has).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "deltasync/result.hpp"

namespace deltasync::shm {

/// Fills bytes [begin, end) of a new file with huge pages as far as the system has them, through a mapping of all of it
/// at `base` that nobody has touched yet. Best effort: what is left out is still to be reserved. Nothing is written
/// through the mapping, so a full file system is no SIGBUS. Not worth it for files below kHugeBytesMin.
///
/// One small page is allocated in each huge one's place, since the kernel collapses no empty range; the rest is then
/// zeroed as a huge page and never as small ones. Each call drains caches on all CPUs, hence the large pieces. Measured
/// on 2 GiB: 0.15 to 0.3 s, where reserving small pages takes 0.55 s and collapsing those 1.2 s more.
/// A huge page comes from the node that its first small one came from. Returns 0, or the errno that the rest of the
/// file has small pages for: EINVAL where the kernel cannot do it, or not in this file system.
int fill_with_huge_pages(int fd, std::byte* base, std::uint64_t begin, std::uint64_t end) noexcept;
inline constexpr std::uint64_t kHugeBytesMin = std::uint64_t{64} << 20;

/// The same with one huge page of a file in `dir` that has no name and is gone afterwards.
///   - Errc::unsupported: the kernel or the file system gives none, ever.
///   - Errc::no_space: none is free now.
///   - Errc::permission, Errc::not_found and so on: of the directory.
Status try_huge_page(const std::filesystem::path& dir);

/// An address at which a file of so many bytes can be mapped by huge pages: halves keep their alignment there. A hint
/// only; null: there is none.
void* aligned_hint(std::uint64_t bytes) noexcept;

}  // namespace deltasync::shm
