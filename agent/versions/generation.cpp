#include "agent/versions/generation.hpp"

#include <algorithm>
#include <charconv>
#include <new>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "deltasync/layout.hpp"
#include "format/packed_layout.hpp"
#include "shm/boot.hpp"

namespace deltasync::agent {
namespace {

// A batch's elements have to fit the count of a progress word.
static_assert(std::max(delta::kBatchBytesTarget, std::uint64_t{kTileElementsMax}) < std::uint64_t{1}
                                                                                        << shm::kProgressCountBits);

Result<std::unique_ptr<Generation>> make(std::unique_ptr<shm::Segment> segment, std::uint64_t number, LayoutPtr layout,
                                         std::vector<delta::Batch> batches) {
  auto generation = std::make_unique<Generation>();
  generation->number = number;
  generation->layout = std::move(layout);
  generation->batches = std::move(batches);
  generation->batch_elements = delta::batch_elements(*generation->layout, generation->batches);
  DS_ASSIGN(const wire::LayoutMessage packed, wire::pack_layout(segment->layout_encoded(), segment->sidecar_encoded()));
  generation->layout_payload = std::make_shared<const std::vector<std::byte>>(packed.encode());
  generation->segment = std::move(segment);
  DS_ASSIGN(generation->role, shm::AgentRole::adopt(*generation->segment));
  return generation;
}

}  // namespace

Result<std::unique_ptr<Generation>> Generation::create(const shm::SegmentPath& path, std::uint64_t number,
                                                       LayoutPtr layout, ByteSpan layout_encoded,
                                                       ByteSpan sidecar_encoded) {
  const std::string what = "segment " + path.name;
  std::vector<delta::Batch> batches = delta::make_batches(*layout);
  const shm::Segment::Geometry geometry{layout->half_bytes(), batches.size(), layout->digest()};
  DS_ASSIGN(auto segment,
            shm::Segment::create(path, number, geometry, layout_encoded, sidecar_encoded).with_context(what));
  if (!shm::is_of_this_boot(segment->file())) {
    log::warn(
        "segment_not_kept name={} effect=\"an agent that is started again begins without it: it is on a disk "
        "whose file system keeps no user attributes\"",
        path.name);
  }
  auto generation = make(std::move(segment), number, std::move(layout), std::move(batches)).with_context(what);
  if (!generation) static_cast<void>(shm::Segment::unlink(path));
  return generation;
}

Result<std::unique_ptr<Generation>> Generation::adopt(const shm::SegmentPath& path, std::uint64_t number) {
  const std::string what = "segment " + path.name;
  DS_ASSIGN(auto segment, shm::Segment::attach(path).with_context(what));
  if (!shm::is_of_this_boot(segment->file())) {
    return Error(Errc::corrupt, what +
                                    ": it is on a disk, and not known to be of this boot of the machine: pages that "
                                    "had not been written back may be lost");
  }
  DS_ASSIGN(LayoutPtr layout, Layout::decode(segment->layout_encoded()).with_context(what));
  if (layout->half_bytes() > segment->half_bytes()) {
    return Error(Errc::corrupt, what + ": the layout needs " + std::to_string(layout->half_bytes()) +
                                    " bytes, a half has " + std::to_string(segment->half_bytes()));
  }
  if (!segment->sidecar_encoded().empty()) {
    DS_TRY(Sidecar::decode(segment->sidecar_encoded(), *layout).with_context(what));
  }
  std::vector<delta::Batch> batches = delta::make_batches(*layout);
  if (segment->batches() != batches.size()) {
    return Error(Errc::corrupt, what + ": it counts " + std::to_string(segment->batches()) +
                                    " batches, the layout has " + std::to_string(batches.size()));
  }
  return make(std::move(segment), number, std::move(layout), std::move(batches)).with_context(what);
}

std::string segment_name(const std::string& agent_name, std::uint64_t number) {
  return agent_name + ".g" + std::to_string(number);
}

Result<std::vector<FoundSegment>> find_segments(const std::filesystem::path& dir, const std::string& agent_name) {
  std::vector<FoundSegment> found;
  std::error_code ec;
  std::filesystem::directory_iterator it(dir, ec);
  const std::string prefix = agent_name + ".g";
  for (; !ec && it != std::filesystem::directory_iterator(); it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    std::uint64_t number = 0;
    const char* const end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + prefix.size(), end, number);
    if (parsed.ec != std::errc() || parsed.ptr != end || segment_name(agent_name, number) != name) continue;
    found.push_back({number, {dir, name}});
  }
  if (ec) return Error::from_errno("segment directory " + dir.string(), ec.value());
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.number > b.number; });
  return found;
}

}  // namespace deltasync::agent
