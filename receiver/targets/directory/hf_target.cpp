// Opening, full updates, commit and rollback of the HF directory target.
#include "receiver/targets/directory/hf_target.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/tile_memory.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kDigestTilesPerItem = 32;

}  // namespace

// ---- opening -------------------------------------------------------------------------------------------------------

/// The current version first, then the others from the newest.
std::vector<std::string> HfTarget::resume_order() const {
  std::vector<std::pair<VersionId, std::string>> known;
  for (const std::string& name : store_.names()) {
    if (const auto record = store_.read_record(name); record.ok()) known.emplace_back(record->version.id, name);
  }
  std::sort(known.rbegin(), known.rend());
  std::vector<std::string> order;
  if (const auto current = store_.current()) order.push_back(*current);
  for (const auto& [id, name] : known) {
    if (order.empty() || name != order.front()) order.push_back(name);
  }
  return order;
}

Result<HfTarget::Resumed> HfTarget::resume(const std::string& name, const CallContext& until) {
  DS_ASSIGN(const HfRecord record, store_.read_record(name));
  if (record.layout != layout_->digest()) return Error(Errc::layout_mismatch, "it holds another layout");
  if (record.files != store_.files_digest())
    return Error(Errc::layout_mismatch, "it was written with other side files");
  Resumed resumed;
  DS_ASSIGN(resumed.model, store_.map(store_.directory(name), /*writable=*/false));
  DS_TRY(store_.check_files(store_.directory(name), resumed.model));
  resumed.state.version = record.version;
  resumed.state.digests.resize(layout_->tile_count());
  const std::uint64_t items = (layout_->tile_count() + kDigestTilesPerItem - 1) / kDigestTilesPerItem;
  const auto digest_some = [&](std::uint64_t item, unsigned) -> Status {
    const std::uint64_t end = std::min((item + 1) * kDigestTilesPerItem, layout_->tile_count());
    for (std::uint64_t i = item * kDigestTilesPerItem; i < end; ++i) {
      const Tile tile = tile_of(*layout_, i);
      const std::uint32_t width = layout_->tensors()[tile.tensor].element_bytes;
      const delta::TensorMemory memory = store_.tensor_memory(resumed.model, tile.tensor);
      resumed.state.digests[i] = delta::tile_digest(delta::tile_address(memory, tile, width), memory.row_stride,
                                                    tile.rect.rows, tile.rect.cols * width);
    }
    return {};
  };
  DS_TRY(run_all(*pool_, items, until, "verifying " + store_.directory(name).string(), digest_some));
  resumed.state.root = delta::root_digest(resumed.state.digests);
  if (resumed.state.root != record.root) return Error(Errc::corrupt, "its tensors are not those of its record");
  return resumed;
}

Status HfTarget::open(ThreadPool& pool, const CallContext& until) {
  pool_ = &pool;
  DS_TRY(store_.remove_leftovers(until));
  const std::optional<std::string> current = store_.current();
  bool current_is_broken = false;
  for (const std::string& name : resume_order()) {
    auto resumed = resume(name, until);
    if (!resumed.ok()) {
      const Errc why = resumed.error().code();
      if (why == Errc::timed_out || why == Errc::cancelled) return std::move(resumed).error();
      log::warn("hf_target ignores_version name={} reason=\"{}\"", name, resumed.error().to_string());
      // What was committed last serves until the next commit, though its layout or side files are no base for a delta;
      // nothing older takes its place. A broken directory must not be what engines load.
      if (current == name && why == Errc::layout_mismatch) return {};
      // But it goes only when the versions after it have been looked at: what runs out of time changes nothing.
      if (current == name) current_is_broken = true;
      continue;
    }
    if (current != name) {
      if (Status status = store_.point_current(name); !status.ok()) {
        if (current_is_broken) DS_TRY(store_.clear_current());
        return status;
      }
    }
    committed_ = std::move(resumed->state);
    live_ = std::move(resumed->model);
    name_ = name;
    log::info("hf_target resumes version={}", to_string(committed_->version));
    return {};
  }
  return current_is_broken ? store_.clear_current() : Status();
}

Result<TileRows> HfTarget::live_tile(const Tile& tile, std::vector<std::byte>& /*mapped as a half is*/) const {
  if (!committed_) return TileRows{};
  return tile_rows(*layout_, tile, store_.tensor_memory(live_, tile.tensor));
}

void HfTarget::invalidate() noexcept {
  can_rollback_ = false;
  if (committed_) drop_committed();
}

// ---- full ----------------------------------------------------------------------------------------------------------

/// In place: the disk has room for one version only. Readers that have files open keep those, and their blocks.
void HfTarget::drop_committed() {
  if (Status status = store_.clear_current(); !status.ok()) {
    log::warn("hf_target clear_current error=\"{}\"", status.error().to_string());
  }
  committed_.reset();
  live_.clear();
  store_.remove_version(name_);
  if (previous_) store_.remove_version(previous_->name);
  previous_.reset();
  name_.clear();
}

/// Once more without the versions before, if the disk is too full: the update that begins has ended the
/// rollback to them. Some may be there that this target did not commit (a restart), or that had a reader until now.
Result<std::filesystem::path> HfTarget::with_room(const std::function<Result<std::filesystem::path>()>& write) {
  auto incoming = write();
  if (incoming.ok() || incoming.error().code() != Errc::no_space) return incoming;
  previous_.reset();
  served_.clear();
  remove_unused();
  return write();
}

Result<std::filesystem::path> HfTarget::fill_incoming(const CallContext& until) {
  DS_TRY(store_.check_room());
  DS_ASSIGN(std::filesystem::path incoming, store_.make_incoming());
  const auto fill = [&]() -> Status {
    DS_TRY(store_.write_other_files(incoming, until));
    DS_ASSIGN(const std::vector<UniqueFd> files, store_.create_weight_files(incoming, until));
    return store_.write_headers(incoming, files);
  };
  if (Status status = fill(); !status.ok()) {
    remove_tree(incoming);
    return std::move(status).error();
  }
  return incoming;
}

Status HfTarget::begin_full(FullUpdatePolicy policy, const CallContext& until) {
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  if (full_) return Error(Errc::invalid_argument, "a full update is open already");
  if (committed_ && policy == FullUpdatePolicy::refuse) {
    return Error(Errc::no_space, "a full update over the live version " + to_string(committed_->version) +
                                     " needs a second directory, which the policy refuses");
  }
  DS_TRY(until.check("opening a full update"));
  can_rollback_ = false;
  const bool lost = committed_ && policy == FullUpdatePolicy::in_place;
  if (lost) drop_committed();
  DS_ASSIGN(std::filesystem::path incoming, with_room([&] { return fill_incoming(until); }));
  auto model = store_.map(incoming, /*writable=*/true);
  if (!model.ok()) {
    remove_tree(incoming);
    return std::move(model).error();
  }
  full_ = OpenFull{std::move(incoming), std::move(*model), lost};
  return {};
}

Result<TileRows> HfTarget::full_tile(const Tile& tile, std::vector<std::byte>& /*mapped as a half is*/) {
  if (!full_) return TileRows{};
  return tile_rows(*layout_, tile, store_.tensor_memory(full_->model, tile.tensor));
}

Status HfTarget::put_tile(const Tile& tile, const TileRows& rows) {
  if (full_)
    copy_tile_rows(*layout_, tile, rows, tile_rows(*layout_, tile, store_.tensor_memory(full_->model, tile.tensor)));
  return {};
}

std::byte* HfTarget::full_rows(std::uint32_t tensor) {
  return full_ ? store_.tensor_memory(full_->model, tensor).base : nullptr;
}

void HfTarget::discard_full() noexcept {
  if (!full_) return;
  full_->model.clear();
  if (fork_guard_.same_process()) remove_tree(full_->directory);
  full_.reset();
}

Status HfTarget::commit_full(TargetState state, Deadline /*of a flush, a rename and little else*/) {
  if (!full_) return Error(Errc::invalid_argument, "no full update is open");
  DS_TRY(check_state(*layout_, TileSet::whole(*layout_), state));
  const std::filesystem::path incoming = full_->directory;
  const bool lost_live = full_->lost_live;
  full_.reset();  // unmaps
  DS_TRY(make_current(incoming, std::move(state)));
  can_rollback_ = !lost_live;
  return {};
}

// ---- commit and rollback -------------------------------------------------------------------------------------------

/// The directory gets its name and becomes the committed version. On error it is removed and all is as before.
Status HfTarget::make_current(const std::filesystem::path& incoming, TargetState state) {
  auto model = store_.map(incoming, /*writable=*/false);
  if (!model.ok()) {
    remove_tree(incoming);
    return std::move(model).error();
  }
  DS_ASSIGN(std::string name, store_.publish(incoming, state));
  std::string served = committed_ ? "" : store_.current().value_or("");
  if (Status status = store_.point_current(name); !status.ok()) {
    model->clear();
    store_.remove_version(name);
    return std::move(status).error();
  }
  previous_.reset();
  if (committed_) previous_ = Previous{std::move(name_), *std::move(committed_), {}};
  served_ = std::move(served);
  committed_ = std::move(state);
  name_ = std::move(name);
  live_ = std::move(*model);
  can_rollback_ = true;
  remove_unused();
  return {};
}

void HfTarget::remove_unused() {
  std::set<std::string> keep;
  if (previous_) keep.insert(previous_->name);
  if (store_.keep_before() > 1) {
    std::vector<std::string> newest = resume_order();  // the committed one first
    newest.resize(std::min<std::size_t>(newest.size(), store_.keep_before() + 1));
    keep.insert(newest.begin(), newest.end());
  }
  if (committed_) {
    keep.insert(name_);
    if (!served_.empty()) keep.insert(served_);
  } else if (const auto served = store_.current()) {
    keep.insert(*served);  // no base for us, but engines load it
  }
  store_.remove_unused(keep);
}

Status HfTarget::rollback() {
  if (full_) return Error(Errc::invalid_argument, "a full update is open");
  if (!can_rollback_) return Error(Errc::unsupported, "there is no commit that could be rolled back");
  if (!previous_) {  // the first version: before it there was nothing, or what another target has left
    DS_TRY(served_.empty() ? store_.clear_current() : store_.point_current(served_));
    committed_.reset();
    live_.clear();
    name_.clear();
  } else {
    DS_ASSIGN(MappedModel model, store_.map(store_.directory(previous_->name), /*writable=*/false));
    DS_TRY(store_.point_current(previous_->name));
    live_ = std::move(model);
    committed_ = std::move(previous_->state);
    name_ = std::move(previous_->name);
    previous_.reset();
  }
  can_rollback_ = false;
  remove_unused();
  return {};
}

Result<std::unique_ptr<Target>> make_hf_target(LayoutPtr layout, Sidecar sidecar, std::filesystem::path out,
                                               HfTargetOptions options) {
  auto store = HfStore::open(layout, std::move(sidecar), std::move(out), options);
  if (!store.ok()) return std::move(store).error().with_context("directory target");
  return std::unique_ptr<Target>(new HfTarget(std::move(layout), *std::move(store)));
}

}  // namespace deltasync
