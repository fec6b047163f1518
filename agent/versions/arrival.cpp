#include "agent/versions/arrival.hpp"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include "base/log.hpp"
#include "delta/delta.hpp"
#include "format/arrival_file.hpp"
#include "shm/side_files.hpp"

namespace deltasync::agent {
namespace {

std::filesystem::path file_of(const Generation& generation) {
  return shm::side_file_path(generation.segment->path(), shm::kHandedSideFile);
}

Result<ArrivingVersion> read(const std::filesystem::path& path, const Generation& generation,
                             const shm::FillView& fill) {
  DS_ASSIGN(const MappedFile file, shm::open_side_file(path));
  DS_ASSIGN(ArrivingVersion said, decode_arriving(file.bytes(), *generation.layout));
  if (!(said.version == fill.version)) {
    return Error(Errc::version_conflict, "it is about " + to_string(said.version) + ", not " + to_string(fill.version));
  }
  if (delta::root_digest(said.digests) != said.root) return Error(Errc::corrupt, "its digests have another root");
  return said;
}

/// The fill goes on, or has become a version.
bool goes_on(const ServedVersion& version) {
  const shm::HalfStatus half = shm::inspect_half(*version.generation->segment, version.half.half);
  if (half.sequence != version.half.sequence) return false;
  return half.state != shm::HalfState::quarantined && half.state != shm::HalfState::free;
}

}  // namespace

void Arrival::follow() {
  give_back();
  const SnapshotPtr now = versions_.snapshot();
  if (now_ && now->arriving == now_ && goes_on(*now_)) return;
  if (ServedPtr over = std::exchange(now_, nullptr)) {
    const bool published = now->served && now->served->half == over->half;
    ::unlink(file_of(*over->generation).c_str());
    if (!published) {
      log::info("version_arrives_no_more version=\"{}\"", to_string(over->version));
      versions_.withdraw(over);
      leases_.revoke(over->half);
      leaving_.push_back(std::move(over));
      give_back();
    }
  }
  if (!now->served) look_for_one(*now);
}

void Arrival::look_for_one(const Snapshot& now) {
  const GenerationPtr& generation = now.generation;
  const auto fill = generation ? generation->role->filling() : std::nullopt;
  if (!fill) return;
  const std::filesystem::path path = file_of(*generation);
  if (::access(path.c_str(), F_OK) != 0) return;
  auto said = read(path, *generation, *fill);
  if (!said) {
    log::warn("arriving_version_refused version=\"{}\" error=\"{}\" effect=\"it is served once it is whole\"",
              to_string(fill->version), said.error().to_string());
    ::unlink(path.c_str());
    return;
  }
  if (!generation->role->hold(*fill)) return;
  auto version = std::make_shared<ServedVersion>();
  version->generation = generation;
  version->half = {generation->number, fill->half, fill->sequence};
  version->version = std::move(said->version);
  version->root = said->root;
  version->digests = std::make_shared<const std::vector<std::uint64_t>>(std::move(said->digests));
  version->relayed = true;
  version->arriving = *fill;
  version->published_at = std::chrono::steady_clock::now();
  now_ = std::move(version);
  log::info("version_arrives version=\"{}\" root={} generation={}", to_string(now_->version), to_string(now_->root),
            generation->number);
  versions_.announce(now_);
}

/// SYNC POINT plan: it was withdrawn before, so a lease that is not seen here begins too late to count.
void Arrival::give_back() {
  std::erase_if(leaving_, [this](const ServedPtr& version) {
    if (!leases_.idle(version->half)) return false;
    version->generation->role->unhold(*version->arriving);
    return true;
  });
}

}  // namespace deltasync::agent
