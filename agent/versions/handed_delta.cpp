#include "agent/versions/handed_delta.hpp"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include "agent/versions/kept_delta.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "shm/side_files.hpp"

namespace deltasync::agent {
namespace {

/// The digests after a delta whose frames are valid, of which those before are `digests`.
Status advance(const Layout& layout, const delta::Delta& delta, std::vector<std::uint64_t>& digests) {
  for (const delta::Frame& frame : delta.frames) {
    DS_ASSIGN(const std::vector<delta::TileRecord> records, delta::parse_frame(layout, frame.bytes));
    for (const delta::TileRecord& record : records) {
      digests[static_cast<std::size_t>(record.tile)] = record.digest_after;
    }
  }
  if (delta::root_digest(digests) != delta.to_root) return Error(Errc::corrupt, "it does not lead to its root");
  return {};
}

Result<delta::Delta> read(const std::filesystem::path& path, const ServedVersion& before, const shm::HalfView& sealed,
                          std::vector<std::uint64_t>& digests) {
  const Layout& layout = *before.generation->layout;
  DS_ASSIGN(delta::KeptDelta kept, read_kept_delta(path, layout));
  if (!(kept.from.id == before.version.id) || kept.delta.from_root != before.root) {
    return Error(Errc::version_conflict, "it starts from " + to_string(kept.from) + " in another state than is served");
  }
  if (!(kept.to == sealed.version)) {
    return Error(Errc::version_conflict, "it leads to " + to_string(kept.to) + ", not to " + to_string(sealed.version));
  }
  std::vector<std::uint64_t> after = *before.digests;
  DS_TRY(advance(layout, kept.delta, after));
  digests = std::move(after);
  return std::move(kept.delta);
}

}  // namespace

std::optional<delta::Delta> take_handed_delta(const ServedVersion& before, const shm::HalfView& sealed,
                                              std::vector<std::uint64_t>& digests) {
  const auto path = shm::side_file_path(before.generation->segment->path(), shm::kHandedSideFile);
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  const trace::Span span("take delta", sealed.version.id);
  auto handed = read(path, before, sealed, digests);
  ::unlink(path.c_str());
  if (handed) return std::move(*handed);
  log::warn("handed_delta_refused version=\"{}\" error=\"{}\" effect=\"the halves are compared\"",
            to_string(sealed.version), handed.error().to_string());
  return std::nullopt;
}

}  // namespace deltasync::agent
