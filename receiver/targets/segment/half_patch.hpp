// A version made where the one before the last lies, by the changes since. What it costs follows the changes, not the
// model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/writer.hpp"
#include "receiver/targets/segment/tile_patches.hpp"

namespace deltasync::relay {

/// Applies `patches` to the open fill of `writer`, whose half has a version with the digests `before`. A tile that has
/// no patch is not looked at. corrupt: a tile would not get its digest of `after`; timed_out between two rounds; errors
/// of change_fill(). After an error the fill is to be aborted.
Status patch_half(const Layout& layout, Writer& writer, ThreadPool& pool, const TilePatches& patches,
                  std::span<const std::uint64_t> before, std::span<const std::uint64_t> after, Deadline deadline);

}  // namespace deltasync::relay
