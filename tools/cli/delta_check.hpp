// Decoding a delta tile by tile beside the state that it has to lead to.
#pragma once

#include "base/bytes.hpp"
#include "base/thread_pool.hpp"
#include "delta/delta.hpp"

namespace deltasync::tools {

/// Applies every tile of a delta to a copy of that tile in `before`, and compares the bytes with those in `after`
/// (both halves of the layout). `digests` are those of `before`. `corrupt` names a tile that does not decode or
/// comes out different. Memory: one tile a thread.
Status check_delta(const Layout& layout, const delta::Delta& delta, ByteSpan before, ByteSpan after,
                   std::span<const std::uint64_t> digests, ThreadPool& pool);

}  // namespace deltasync::tools
