#include "agent/versions/adopt.hpp"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.hpp"
#include "shm/side_files.hpp"

namespace deltasync::agent {
namespace {

/// Those that an agent before this one did not come to remove after their segment.
Status sweep_stray_deltas(const CoreOptions& options) {
  DS_ASSIGN(const auto strays, shm::find_stray_side_files(options.shm_dir));
  std::size_t swept = 0;
  for (const shm::StraySideFile& stray : strays) {
    if (stray.agent_name == options.name && ::unlink(stray.path.c_str()) == 0) ++swept;
  }
  if (swept != 0) log::info("kept_deltas_swept files={} reason=\"their segment is gone\"", swept);
  return {};
}

}  // namespace

Result<AdoptedSegments> adopt_segments(const CoreOptions& options, Reclaimer& reclaimer) {
  DS_ASSIGN(const auto found, find_segments(options.shm_dir, options.name));
  AdoptedSegments adopted;
  bool has_version = false;
  for (const FoundSegment& segment : found) {
    adopted.next_number = std::max(adopted.next_number, segment.number + 1);
    auto generation = has_version
                          ? Result<std::unique_ptr<Generation>>(Error(Errc::gone, "older than the one that is served"))
                          : Generation::adopt(segment.path, segment.number);
    if (!generation) {
      const Error& error = generation.error();
      // It may hold the last version: only what can never be read again is removed. A lack of memory or descriptors
      // passes, and what belongs to somebody else is neither ours to remove nor safe to ignore.
      if (!has_version && error.code() != Errc::corrupt) {
        return std::move(generation)
            .error()
            .with_context("segment " + segment.path.name + ", which may hold the last version (remove it in " +
                          segment.path.dir.string() + " if it is not needed)");
      }
      log::warn("segment_removed name={} reason=\"{}\"", segment.path.name, error.to_string());
      DS_TRY(shm::Segment::unlink(segment.path));
      continue;
    }
    const shm::AgentRole& role = *(*generation)->role;
    has_version = role.active() || role.sealed();
    if (has_version) adopted.newest = shm::inspect_newest(*(*generation)->segment).id;
    log::info("segment_adopted name={} layout={} has_version={}", segment.path.name,
              to_string((*generation)->layout->digest()), has_version);
    adopted.generations.insert(adopted.generations.begin(), reclaimer.keep(std::move(generation).value()));
  }
  DS_TRY(sweep_stray_deltas(options));
  return adopted;
}

}  // namespace deltasync::agent
