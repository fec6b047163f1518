#include "receiver/targets/target.hpp"

void std::default_delete<deltasync::Target>::operator()(deltasync::Target* target) const noexcept {
  delete target;
}

namespace deltasync {

Status roll_back(Target& target) {
  if (auto* const can = target.capabilities().rollback) return can->rollback();
  return Error(Errc::unsupported, "commits of this kind of target are final");
}

void forget_rollback(Target& target) noexcept {
  if (auto* const can = target.capabilities().rollback) can->forget_rollback();
}

Status subscribe(Target& target, const TileSet& tiles) {
  if (auto* const can = target.capabilities().slices) return can->subscribe(tiles);
  if (tiles.is_whole()) return {};
  return Error(Errc::unsupported, "this kind of target keeps whole models, no slices of them");
}

const TileSet* kept_tiles(Target& target) {
  auto* const slices = target.capabilities().slices;
  return slices != nullptr ? slices->kept() : nullptr;
}

}  // namespace deltasync
