#include "receiver/targets/attest.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {

namespace {

Status read_digests(Target& target, std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                    const CallContext& until) {
  if (auto* const can = target.capabilities().digests) return can->live_digests(tiles, digests, until);
  std::vector<std::byte> scratch;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    DS_TRY(until.check("reading live memory"));
    DS_ASSIGN(digests[i], live_digest(target, tile_of(*target.layout(), tiles[i]), scratch));
  }
  return {};
}

}  // namespace

std::string to_string(const TileMismatch& wrong) {
  const std::string tile = "tile " + std::to_string(wrong.tile) + " (" + wrong.tensor + ")";
  return wrong.copy_in.empty() ? tile : tile + ", the copy in " + wrong.copy_in;
}

std::string describe(std::span<const TileMismatch> wrong) {
  std::string text = to_string(wrong.front());
  if (wrong.size() > 1) text += " and " + std::to_string(wrong.size() - 1) + " more";
  return text + (wrong.size() > 1 ? " differ" : " differs") + " from what was committed";
}

std::vector<std::uint64_t> scrub_list(const TileSet& tiles, std::uint64_t count, std::uint64_t scrub) {
  count = std::min(count, tiles.tiles());
  std::vector<std::uint64_t> list;
  if (count == 0) return list;
  const std::uint64_t round = (tiles.tiles() + count - 1) / count | 1;
  for (std::uint64_t i = 0; i < count; ++i) list.push_back(tiles.nth((scrub % round * count + i) % tiles.tiles()));
  std::sort(list.begin(), list.end());
  return list;
}

Result<std::vector<TileMismatch>> attest(Target& target, const TileSet& tiles, const CallContext& until) {
  const TileSet* const kept = kept_tiles(target);
  const bool are_kept = kept == nullptr || (kept->layout() == tiles.layout() && kept->digest() == tiles.digest());
  std::vector<std::uint64_t> list;
  list.reserve(static_cast<std::size_t>(tiles.tiles()));
  for (const wire::TileRange& range : tiles.ranges()) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
      if (!are_kept && !kept->contains(tile)) {
        return Error(Errc::invalid_argument, describe_tile(*target.layout(), tile) + " is not kept by the target");
      }
      list.push_back(tile);
    }
  }
  return attest(target, list, until);
}

Result<std::vector<TileMismatch>> attest(Target& target, std::span<const std::uint64_t> tiles, const CallContext& until,
                                         Copies copies) {
  const TargetState* const committed = target.committed();
  if (committed == nullptr) return Error(Errc::not_found, "nothing is committed that could be attested");
  if (tiles.empty()) return std::vector<TileMismatch>();
  const Layout& layout = *target.layout();
  const auto name_of = [&](std::uint64_t tile) { return layout.tensors()[layout.tensor_of_tile(tile)].spec.name; };
  std::vector<std::uint64_t> digests(tiles.size());
  DS_TRY(read_digests(target, tiles, digests, until));
  std::vector<TileMismatch> wrong;
  std::vector<std::uint64_t> right;
  right.reserve(tiles.size());
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (digests[i] == committed->digests[static_cast<std::size_t>(tiles[i])]) {
      right.push_back(tiles[i]);
    } else {
      wrong.push_back({tiles[i], name_of(tiles[i]), {}});
    }
  }
  CanReadCopies* const can = target.capabilities().copies;
  if (can == nullptr) return wrong;
  const Status readers = can->prepare_copies(until);
  if (!readers.ok()) {
    if (copies == Copies::all || until.over()) return readers.error();
    log::warn("receiver does_not_read_copies why=\"{}\"", readers.error().to_string());
    return wrong;
  }
  DS_ASSIGN(const std::vector<WrongCopy> found, can->wrong_copies(right, until));
  for (const WrongCopy& copy : found) wrong.push_back({copy.tile, name_of(copy.tile), copy.memory});
  std::sort(wrong.begin(), wrong.end(), [](const TileMismatch& a, const TileMismatch& b) { return a.tile < b.tile; });
  return wrong;
}

Result<std::vector<TileMismatch>> attest(Target& target, const CallContext& until) {
  if (const TileSet* const kept = kept_tiles(target)) return attest(target, *kept, until);
  return attest(target, TileSet::whole(*target.layout()), until);
}

namespace {

/// Whether these tiles of the version that is committed now are wrong, as far as anybody can tell.
bool wrong_now(Target& target, const std::vector<TileMismatch>& suspects) {
  std::vector<std::uint64_t> tiles;
  tiles.reserve(suspects.size());
  for (const TileMismatch& suspect : suspects) tiles.push_back(suspect.tile);
  // Few tiles: what the commit's deadline has left does not matter to them.
  const auto wrong = attest(target, tiles, Deadline::after(std::chrono::seconds(30)));
  return !wrong.ok() || !wrong->empty();
}

}  // namespace

CommitVerdict attest_commit(Target& target, const TileSet& tiles, const CallContext& until) {
  auto wrong = attest(target, tiles, until);
  if (wrong.ok() && wrong->empty()) return {};
  Error why = wrong.ok() ? Error(Errc::corrupt, "live memory: " + describe(*wrong))
                         : Error(wrong.error()).with_context("attesting live memory");
  const auto with = [&](const std::string& what_now) { return Error(why.code(), why.message() + "; " + what_now); };
  if (const Status back = roll_back(target); !back.ok()) {
    if (target.committed() != nullptr) target.invalidate();
    return {with("it cannot be rolled back (" + back.error().message() + "), and there is no version any more"), false};
  }
  if (target.committed() == nullptr) return {with("rolled back: there is no version, as before"), false};
  const std::string before = "rolled back to " + to_string(target.committed()->version);
  if (!wrong.ok()) return {with(before), false};
  if (!wrong_now(target, *wrong)) return {with(before), false};
  return {with(before + ", where it is wrong as well, for all that is known: repair it, or the next pull replaces it"),
          true};
}

}  // namespace deltasync
