// What every target checks about an update before it touches a byte, and a parallel loop that can fail.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "base/thread_pool.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// Of bringing the version before back, which has no deadline of its own: a bound for what never ends.
inline constexpr std::chrono::minutes kRollbackLimit{10};

/// One digest for each tile, and the root that belongs to those of `tiles`.
Status check_state(const Layout& layout, const TileSet& tiles, const TargetState& state);

/// The steps lead from `committed` (may be null: version_conflict) to `after`: versions chain, every tile exists and
/// is named at most once in a step and is one of `tiles`, the last record of a tile ends at its digest in `after`, all
/// other digests stay. An engine stands still meanwhile.
Status check_steps(const Layout& layout, const TileSet& tiles, const TargetState* committed,
                   const std::vector<StagedStep>& steps, const TargetState& after, ThreadPool& pool);

/// fn(index, worker) for each index in [0, count) on the pool. After the first failure the remaining indices are
/// skipped; that failure is returned. no_space: memory ran out (bad_alloc).
Status run_all(ThreadPool& pool, std::uint64_t count, const std::function<Status(std::uint64_t, unsigned)>& fn);

/// As above, and timed_out or cancelled, naming `what`, once the end has come before an index is begun.
Status run_all(ThreadPool& pool, std::uint64_t count, const CallContext& until, std::string_view what,
               const std::function<Status(std::uint64_t, unsigned)>& fn);

/// The state digest of a tile's rows; of a tile as it is in the committed version's memory (not_found if there is
/// none).
std::uint64_t digest_of_rows(const Layout& layout, const Tile& tile, const TileRows& rows);
Result<std::uint64_t> live_digest(const Target& target, const Tile& tile, std::vector<std::byte>& scratch);

/// "tile 88 (model.layers.3.mlp.up_proj.weight)": how messages name a tile.
std::string describe_tile(const Layout& layout, std::uint64_t tile);

}  // namespace deltasync
