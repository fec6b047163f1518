#include "agent/versions/kept_delta.hpp"

#include <algorithm>
#include <utility>

#include "shm/side_files.hpp"

namespace deltasync::agent {

std::vector<std::byte> kept_delta_head(const RingEntry& entry) {
  return delta::kept_delta_head(*entry.delta, entry.from, entry.to, entry.before);
}

Result<delta::KeptDelta> read_kept_delta(const std::filesystem::path& path, const Layout& layout) {
  DS_ASSIGN(const MappedFile file, shm::open_side_file(path));
  return delta::decode_kept_delta(file.bytes(), layout);
}

std::shared_ptr<RingEntry> entry_of(delta::KeptDelta kept) {
  auto entry =
      RingEntry::make(std::move(kept.delta), std::move(kept.from), std::move(kept.to), 0, std::move(kept.before));
  entry->found_at_start = true;
  return entry;
}

std::vector<RingEntryPtr> chain_to(const VersionId& version, const Digest128& root, std::vector<std::uint64_t> digests,
                                   const std::vector<RingEntryPtr>& deltas) {
  std::vector<RingEntryPtr> chain;
  VersionId to = version;
  Digest128 to_root = root;
  // Each delta leads to a later version than it comes from, so this ends.
  for (;;) {
    const auto found = std::find_if(deltas.begin(), deltas.end(), [&](const RingEntryPtr& entry) {
      const delta::Delta& d = *entry->delta;
      return d.to == to && d.to_root == to_root && d.from < d.to;
    });
    if (found == deltas.end()) break;
    for (const DigestBefore& before : (*found)->before) digests[static_cast<std::size_t>(before.tile)] = before.digest;
    if (delta::root_digest(digests) != (*found)->delta->from_root) break;
    to = (*found)->delta->from;
    to_root = (*found)->delta->from_root;
    chain.push_back(*found);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace deltasync::agent
