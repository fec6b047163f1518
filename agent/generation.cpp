#include "agent/generation.hpp"

#include <algorithm>
#include <charconv>
#include <new>
#include <system_error>
#include <utility>

#include "deltasync/hf.hpp"
#include "format/packed_layout.hpp"

namespace deltasync::agent {
namespace {

// A batch's elements have to fit the count of a progress word.
static_assert(std::max(delta::kBatchBytesTarget, std::uint64_t{kTileElementsMax}) < std::uint64_t{1}
                                                                                        << shm::kProgressCountBits);

/// Asked of the system page by page, since an older agent may have placed a segment otherwise, and a full node does not
/// get what was meant for it. Where the system does not tell, it is as the rule has it.
std::vector<std::uint32_t> find_homes(const Generation& generation, const HomeNodes& home_nodes) {
  std::vector<std::uint32_t> homes;
  homes.reserve(generation.batches.size());
  for (const delta::Batch& batch : generation.batches) {
    const std::uint64_t at = delta::batch_offset(*generation.layout, batch);
    const auto home = home_nodes.home_of_page(generation.half(0).data() + at);
    homes.push_back(home.value_or(home_nodes.home_of(at)));
  }
  return homes;
}

Result<std::unique_ptr<Generation>> make(std::unique_ptr<shm::Segment> segment, std::uint64_t number, LayoutPtr layout,
                                         std::vector<delta::Batch> batches, const HomeNodesPtr& home_nodes) {
  auto generation = std::make_unique<Generation>();
  generation->number = number;
  generation->layout = std::move(layout);
  generation->batches = std::move(batches);
  generation->batch_elements = delta::batch_elements(*generation->layout, generation->batches);
  DS_ASSIGN(const wire::LayoutMessage packed, wire::pack_layout(segment->layout_encoded(), segment->sidecar_encoded()));
  generation->layout_payload = std::make_shared<const std::vector<std::byte>>(packed.encode());
  generation->segment = std::move(segment);
  if (home_nodes) generation->batch_homes = find_homes(*generation, *home_nodes);
  DS_ASSIGN(generation->role, shm::AgentRole::adopt(*generation->segment));
  return generation;
}

}  // namespace

Result<std::unique_ptr<Generation>> Generation::create(const shm::SegmentPath& path, std::uint64_t number,
                                                       LayoutPtr layout, ByteSpan layout_encoded,
                                                       ByteSpan sidecar_encoded, const HomeNodesPtr& home_nodes) {
  const std::string what = "segment " + path.name;
  std::vector<delta::Batch> batches = delta::make_batches(*layout);
  const shm::Segment::Geometry geometry{layout->half_bytes(), batches.size(), layout->digest()};
  DS_ASSIGN(auto segment,
            shm::Segment::create(path, number, geometry, layout_encoded, sidecar_encoded, home_nodes.get())
                .with_context(what));
  auto generation =
      make(std::move(segment), number, std::move(layout), std::move(batches), home_nodes).with_context(what);
  if (!generation) static_cast<void>(shm::Segment::unlink(path));
  return generation;
}

Result<std::unique_ptr<Generation>> Generation::adopt(const shm::SegmentPath& path, std::uint64_t number,
                                                      const HomeNodesPtr& home_nodes) {
  const std::string what = "segment " + path.name;
  DS_ASSIGN(auto segment, shm::Segment::attach(path).with_context(what));
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
  return make(std::move(segment), number, std::move(layout), std::move(batches), home_nodes).with_context(what);
}

GenerationPtr GenerationYard::keep(std::unique_ptr<Generation> generation) {
  const std::uint64_t number = generation->number;
  {
    const std::lock_guard lock(mutex_);
    mapped_.insert(number);
    held_[number];
    left_.reserve(mapped_.size());  // so that take() needs no memory
  }
  GenerationPtr kept{generation.release(),
                     [yard = shared_from_this()](Generation* last) { yard->take(std::unique_ptr<Generation>(last)); }};
  const std::lock_guard lock(mutex_);
  held_[number] = kept;
  return kept;
}

void GenerationYard::take(std::unique_ptr<Generation> generation) noexcept {
  {
    const std::lock_guard lock(mutex_);
    held_.erase(generation->number);
    if (!closed_) {
      left_.push_back(std::move(generation));
      came_.notify_all();
      return;
    }
    mapped_.erase(generation->number);
  }
  generation.reset();
}

void GenerationYard::bury(std::shared_ptr<const void> thing) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    buried_.push_back(std::move(thing));
    came_.notify_all();
  } catch (const std::bad_alloc&) {
  }
}

void GenerationYard::work() {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    came_.wait(lock, [this] { return closed_ || !left_.empty() || !buried_.empty(); });
    lock.unlock();
    clear();
    lock.lock();
  }
}

void GenerationYard::clear() {
  std::unique_lock lock(mutex_);
  while (!buried_.empty()) {
    std::vector<std::shared_ptr<const void>> ended = std::exchange(buried_, {});
    lock.unlock();
    ended.clear();  // a generation that goes with it comes back through take()
    lock.lock();
  }
  while (!left_.empty()) {
    std::unique_ptr<Generation> generation = std::move(left_.back());
    left_.pop_back();
    lock.unlock();
    const std::uint64_t number = generation->number;
    if (before_unmap_) before_unmap_();
    generation.reset();
    lock.lock();
    mapped_.erase(number);
  }
}

void GenerationYard::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    came_.notify_all();
  }
  clear();
}

bool GenerationYard::held(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return held_.count(number) != 0;
}

std::vector<GenerationPtr> GenerationYard::all_held() const {
  std::vector<GenerationPtr> all;
  const std::lock_guard lock(mutex_);
  all.reserve(held_.size());
  for (const auto& [number, generation] : held_) {
    if (auto still = generation.lock()) all.push_back(std::move(still));
  }
  return all;
}

bool GenerationYard::has(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return mapped_.count(number) != 0;
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
