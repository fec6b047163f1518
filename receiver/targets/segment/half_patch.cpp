#include "receiver/targets/segment/half_patch.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {
namespace {

constexpr std::size_t kTilesPerItem = 16;
constexpr std::size_t kTilesPerRound = 4096;  ///< between two looks at the deadline; an abort waits for a round

}  // namespace

Status patch_half(const Layout& layout, Writer& writer, ThreadPool& pool, const TilePatches& patches,
                  std::span<const std::uint64_t> before, std::span<const std::uint64_t> after, Deadline deadline) {
  const std::vector<std::uint64_t> tiles = patches.tiles();
  const auto patch_tile = [&](std::span<std::byte> half, std::uint64_t index) -> Status {
    const Tile tile = tile_of(layout, index);
    const Tensor& tensor = layout.tensors()[tile.tensor];
    const auto row_bytes = static_cast<std::size_t>(tensor.row_bytes());
    std::byte* const rows =
        half.data() + tensor.offset + tile.rect.row * row_bytes + tile.rect.col * tensor.element_bytes;
    DS_ASSIGN(const std::uint64_t digest, patches.apply(layout, index, rows, row_bytes, before[index]));
    if (digest == after[index]) return {};
    return Error(Errc::corrupt, describe_tile(layout, index) + ": the changes do not lead to its digest");
  };
  std::size_t done = 0;
  do {
    if (deadline.passed()) {
      return Error(Errc::timed_out, "deadline passed while tile " + std::to_string(done) + " of " +
                                        std::to_string(tiles.size()) + " was to be patched");
    }
    const std::size_t end = std::min(done + kTilesPerRound, tiles.size());
    const auto change = [&](std::span<std::byte> half) {
      const std::size_t items = (end - done + kTilesPerItem - 1) / kTilesPerItem;
      return run_all(pool, items, [&](std::uint64_t item, unsigned) -> Status {
        const std::size_t first = done + static_cast<std::size_t>(item) * kTilesPerItem;
        for (std::size_t i = first; i < std::min(first + kTilesPerItem, end); ++i) {
          DS_TRY(patch_tile(half, tiles[i]));
        }
        return {};
      });
    };
    DS_TRY(change_fill(writer, change));
    done = end;
  } while (done < tiles.size());
  return {};
}

}  // namespace deltasync::relay
