#include "receiver/attest.hpp"

#include <algorithm>

#include "deltasync/attest.hpp"
#include "placement/regions.hpp"
#include "receiver/target_checks.hpp"

namespace deltasync {

Status Target::live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                            const Until& until) {
  const Layout& layout = *this->layout();
  std::vector<std::byte> scratch;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    DS_TRY(until.check("reading live memory"));
    const Tile tile = layout.tile(tiles[i]);
    DS_ASSIGN(const TileRows live, live_tile(tile, scratch));
    if (live.first == nullptr) return Error(Errc::not_found, "nothing is committed");
    const std::uint64_t row_bytes = tile.rect.cols * layout.tensors()[tile.tensor].element_bytes;
    digests[i] = delta::tile_digest(live.first, live.row_stride, tile.rect.rows, row_bytes);
  }
  return {};
}

Result<std::vector<std::uint64_t>> attest(Target& target, const TileSet& tiles, const Until& until) {
  std::vector<std::uint64_t> list;
  list.reserve(static_cast<std::size_t>(tiles.tiles()));
  for (std::uint64_t i = 0; i < tiles.tiles(); ++i) {
    list.push_back(tiles.nth(i));
    if (target.kept() == nullptr || target.kept()->rank(list.back())) continue;
    return Error(Errc::invalid_argument, describe_tile(*target.layout(), list.back()) + " is not kept by the target");
  }
  const TargetState* const committed = target.committed();
  if (committed == nullptr) return Error(Errc::not_found, "nothing is committed that could be attested");
  std::vector<std::uint64_t> digests(list.size());
  DS_TRY(target.live_digests(list, digests, until));
  std::vector<std::uint64_t> differ;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (digests[i] != committed->digests[static_cast<std::size_t>(list[i])]) differ.push_back(list[i]);
  }
  return differ;
}

Result<std::vector<std::string>> attest(Target& target, const Placement& placement, Deadline deadline,
                                        std::stop_token stop) {
  if (target.layout()->digest() != placement.layout()->digest()) {
    return Error(Errc::layout_mismatch, "the placement is of another layout than the target");
  }
  DS_ASSIGN(const std::vector<std::uint64_t> differ,
            attest(target, placement.parts().tiles, Until(deadline, std::move(stop))));
  std::vector<std::string> names;
  names.reserve(differ.size());
  for (const std::uint64_t tile : differ) names.push_back(describe_tile(*target.layout(), tile));
  return names;
}

}  // namespace deltasync
