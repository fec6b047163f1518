#include "receiver/targets/directory/hf_patch.hpp"

#include <algorithm>

#include "format/tiling.hpp"
#include "receiver/targets/directory/hf_files.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kGroupTiles = 512;  ///< tiles between two calls of go_on: at most 64 MiB of bf16

struct Item {
  std::uint64_t tile = 0;
  const delta::TileRecord* record = nullptr;
};

/// All records, by tile and in the order of the steps for each.
std::vector<Item> sorted_items(const std::vector<const StagedStep*>& steps) {
  std::vector<Item> items;
  for (const StagedStep* step : steps) {
    for (const StagedFrame& frame : step->frames) {
      for (const delta::TileRecord& record : frame.records) items.push_back({record.tile, &record});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.tile < b.tile; });
  return items;
}

/// Moves a tile between its file and packed memory. Rows that follow each other in the file are moved as one.
template <class Move>
Status move_tile(const PatchRequest& request, const Tile& tile, std::vector<std::byte>& packed, const Move& move) {
  const Tensor& tensor = request.layout.tensors()[tile.tensor];
  const HfPlace& place = request.places[tile.tensor];
  const PatchFile& file = request.files[place.file];
  const std::uint64_t row_bytes = tile.rect.cols * tensor.element_bytes;
  const bool contiguous = tile.rect.cols == tensor.cols;
  const std::uint64_t runs = contiguous ? 1 : tile.rect.rows;
  const std::uint64_t run_bytes = contiguous ? row_bytes * tile.rect.rows : row_bytes;
  for (std::uint64_t i = 0; i < runs; ++i) {
    const std::uint64_t at =
        place.offset + (tile.rect.row + i) * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
    const auto run =
        MutByteSpan(packed).subspan(static_cast<std::size_t>(i * run_bytes), static_cast<std::size_t>(run_bytes));
    DS_TRY(move(file.fd, at, run, file.path));
  }
  return {};
}

Status patch_tile(const PatchRequest& request, const Item* first, const Item* end, std::uint64_t& digest,
                  std::vector<std::byte>& packed) {
  const Tile tile = tile_of(request.layout, first->tile);
  const std::size_t row_bytes = tile.rect.cols * request.layout.tensors()[tile.tensor].element_bytes;
  packed.resize(row_bytes * tile.rect.rows);
  DS_TRY(move_tile(request, tile, packed, read_at));
  for (const Item* item = first; item != end; ++item) {
    auto after = delta::apply_tile(request.layout, *item->record, packed.data(), row_bytes, digest);
    if (!after.ok()) return std::move(after).error().with_context(describe_tile(request.layout, first->tile));
    digest = *after;
  }
  // The records speak for the elements that they change. The file was out of our hands, so all others are looked at,
  // too.
  if (delta::tile_digest(packed.data(), row_bytes, tile.rect.rows, row_bytes) != digest) {
    return Error(Errc::corrupt, request.files[request.places[tile.tensor].file].path.string() + ": " +
                                    describe_tile(request.layout, first->tile) + ": somebody wrote to it");
  }
  return move_tile(request, tile, packed, write_at);
}

}  // namespace

Status patch_files(const PatchRequest& request, std::vector<std::uint64_t>& digests, ThreadPool& pool) {
  const std::vector<Item> items = sorted_items(request.steps);
  std::vector<std::size_t> starts;  // of each tile's items, then the end
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i == 0 || items[i].tile != items[i - 1].tile) starts.push_back(i);
  }
  const std::uint64_t tiles = starts.size();
  starts.push_back(items.size());

  std::vector<std::vector<std::byte>> packed(pool.size());
  for (std::uint64_t from = 0; from < tiles; from += kGroupTiles) {
    if (!request.go_on()) return Error(Errc::aborted, "somebody opens a file of the copy that is being patched");
    DS_TRY(run_all(pool, std::min(kGroupTiles, tiles - from), request.deadline, "patching weight files",
                   [&](std::uint64_t i, unsigned worker) {
                     const Item* const first = items.data() + starts[from + i];
                     const Item* const end = items.data() + starts[from + i + 1];
                     return patch_tile(request, first, end, digests[first->tile], packed[worker]);
                   }));
  }
  if (!request.go_on()) return Error(Errc::aborted, "somebody opens a file of the copy that is being patched");
  return {};
}

}  // namespace deltasync
