// Versions as HF model directories (docs/targets.md).
//
// The committed directory is mapped read only and never written. A full update fills an incoming directory through a
// mapping; a delta goes into the version before the committed one, if a write lease on each of its files proves that
// nobody has them, else into a copy. Either becomes a version by a rename, and the committed one by the symlink.
#include <algorithm>
#include <optional>
#include <set>

#include "base/log.hpp"
#include "receiver/hf_lease.hpp"
#include "receiver/hf_patch.hpp"
#include "receiver/hf_store.hpp"
#include "receiver/target_checks.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kCopyPieceBytes = 8u << 20;
constexpr std::uint64_t kDigestTilesPerItem = 32;
/// Frames of the last commit are kept to patch the version before it; larger ones are not worth their memory.
constexpr std::uint64_t kKeptBytesMin = 16u << 20;
constexpr std::uint64_t kKeptModelFraction = 16;

std::uint64_t memory_of(const std::vector<StagedStep>& steps) {
  std::uint64_t bytes = 0;
  for (const StagedStep& step : steps) {
    for (const StagedFrame& frame : step.frames) {
      bytes += frame.bytes.capacity() + frame.records.capacity() * sizeof(delta::TileRecord);
    }
  }
  return bytes;
}

/// The version before the committed one: what rollback() returns to and the next delta may patch.
struct Previous {
  std::string name;
  TargetState state;
  std::vector<StagedStep> steps;  ///< from it to the committed version; empty: it cannot be patched
};

/// A full update that is open.
struct OpenFull {
  std::filesystem::path directory;
  MappedModel model;       ///< writable
  bool lost_live = false;  ///< it began by giving up the version before
};

class HfTarget final : public Target {
 public:
  explicit HfTarget(LayoutPtr layout, HfStore store) : layout_(std::move(layout)), store_(std::move(store)) {}
  ~HfTarget() override { discard_full(); }

  const LayoutPtr& layout() const override { return layout_; }
  bool writes_side_files() const override { return true; }
  Status open(ThreadPool& pool, Deadline deadline) override;
  const TargetState* committed() const override { return committed_ ? &*committed_ : nullptr; }
  delta::TensorMemory live_memory(std::uint32_t tensor) const override;
  Status begin_full(FullOverLive policy) override;
  delta::TensorMemory full_memory(std::uint32_t tensor) override;
  Status commit_full(TargetState state) override;
  void discard_full() noexcept override;
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;
  Status rollback() override;
  /// The version before stays for its readers, and to be patched.
  void forget_rollback() noexcept override { can_rollback_ = false; }

 private:
  struct Resumed {
    TargetState state;
    MappedModel model;
  };
  Result<Resumed> resume(const std::string& name, Deadline deadline);
  std::vector<std::string> resume_order() const;
  void drop_committed();
  template <class Write>
  Result<std::filesystem::path> with_room(const Write& write);
  Result<std::filesystem::path> fill_incoming();
  Result<std::optional<std::filesystem::path>> patch_previous(const std::vector<StagedStep>& steps,
                                                              const TargetState& state, Deadline deadline);
  Result<std::filesystem::path> write_anew(const std::vector<StagedStep>& steps, const TargetState& state,
                                           Deadline deadline);
  Status copy_committed(const std::vector<UniqueFd>& files, const std::vector<std::filesystem::path>& paths,
                        Deadline deadline);
  Status patch(const std::vector<PatchFile>& files, std::vector<const StagedStep*> steps,
               std::vector<std::uint64_t> digests, const TargetState& after, std::function<bool()> go_on,
               Deadline deadline);
  Status make_current(const std::filesystem::path& incoming, TargetState state);
  void remove_unused();

  const LayoutPtr layout_;
  HfStore store_;
  ThreadPool* pool_ = nullptr;
  std::optional<TargetState> committed_;
  std::string name_;  ///< of the committed version
  MappedModel live_;  ///< of the committed version
  std::optional<Previous> previous_;
  bool can_rollback_ = false;
  std::optional<OpenFull> full_;
  bool leases_work_ = true;  ///< until a filesystem says otherwise
};

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

Result<HfTarget::Resumed> HfTarget::resume(const std::string& name, Deadline deadline) {
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
      const Tile tile = layout_->tile(i);
      const std::uint32_t width = layout_->tensors()[tile.tensor].element_bytes;
      const delta::TensorMemory memory = store_.tensor_memory(resumed.model, tile.tensor);
      resumed.state.digests[i] = delta::tile_digest(delta::tile_address(memory, tile, width), memory.row_stride,
                                                    tile.rect.rows, tile.rect.cols * width);
    }
    return {};
  };
  DS_TRY(run_all(*pool_, items, deadline, "verifying " + store_.directory(name).string(), digest_some));
  resumed.state.root = delta::root_digest(resumed.state.digests);
  if (resumed.state.root != record.root) return Error(Errc::corrupt, "its tensors are not those of its record");
  return resumed;
}

Status HfTarget::open(ThreadPool& pool, Deadline deadline) {
  pool_ = &pool;
  store_.remove_leftovers();
  const std::optional<std::string> current = store_.current();
  for (const std::string& name : resume_order()) {
    auto resumed = resume(name, deadline);
    if (!resumed.ok()) {
      const Errc why = resumed.error().code();
      if (why == Errc::timed_out) return std::move(resumed).error();
      spdlog::warn("hf_target ignores_version name={} reason=\"{}\"", name, resumed.error().to_string());
      // What was committed last serves until the next commit, though its layout or side files are no base for a delta;
      // nothing older takes its place. A broken directory must not be what engines load.
      if (current == name && why == Errc::layout_mismatch) return {};
      if (current == name) DS_TRY(store_.clear_current());
      continue;
    }
    if (current != name) DS_TRY(store_.point_current(name));
    committed_ = std::move(resumed->state);
    live_ = std::move(resumed->model);
    name_ = name;
    spdlog::info("hf_target resumes version={}", to_string(committed_->version));
    break;
  }
  return {};
}

delta::TensorMemory HfTarget::live_memory(std::uint32_t tensor) const {
  if (!committed_) return {};
  return store_.tensor_memory(live_, tensor);
}

// ---- full ----------------------------------------------------------------------------------------------------------

/// In place: the disk has room for one version only. Readers that have files open keep those, and their blocks.
void HfTarget::drop_committed() {
  if (Status status = store_.clear_current(); !status.ok()) {
    spdlog::warn("hf_target clear_current error=\"{}\"", status.error().to_string());
  }
  committed_.reset();
  live_.clear();
  store_.remove_version(name_);
  if (previous_) store_.remove_version(previous_->name);
  previous_.reset();
  name_.clear();
}

/// Once more without the versions before, if the disk is too full: the update that begins has ended their use as the
/// way back. Some may be there that this target did not commit (a restart), or that had a reader until now.
template <class Write>
Result<std::filesystem::path> HfTarget::with_room(const Write& write) {
  auto incoming = write();
  if (incoming.ok() || incoming.error().code() != Errc::no_space) return incoming;
  previous_.reset();
  remove_unused();
  return write();
}

Result<std::filesystem::path> HfTarget::fill_incoming() {
  DS_ASSIGN(std::filesystem::path incoming, store_.make_incoming());
  const auto fill = [&]() -> Status {
    DS_TRY(store_.write_other_files(incoming));
    DS_ASSIGN(const std::vector<UniqueFd> files, store_.create_weight_files(incoming));
    return store_.write_headers(incoming, files);
  };
  if (Status status = fill(); !status.ok()) {
    store_.remove_tree(incoming);
    return std::move(status).error();
  }
  return incoming;
}

Status HfTarget::begin_full(FullOverLive policy) {
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  if (full_) return Error(Errc::invalid_argument, "a full update is open already");
  if (committed_ && policy == FullOverLive::refuse) {
    return Error(Errc::no_space, "a full update over the live version " + to_string(committed_->version) +
                                     " needs a second directory, which the policy refuses");
  }
  can_rollback_ = false;
  const bool lost = committed_ && policy == FullOverLive::in_place;
  if (lost) drop_committed();
  DS_ASSIGN(std::filesystem::path incoming, with_room([&] { return fill_incoming(); }));
  auto model = store_.map(incoming, /*writable=*/true);
  if (!model.ok()) {
    store_.remove_tree(incoming);
    return std::move(model).error();
  }
  full_ = OpenFull{std::move(incoming), std::move(*model), lost};
  return {};
}

delta::TensorMemory HfTarget::full_memory(std::uint32_t tensor) {
  if (!full_) return {};
  return store_.tensor_memory(full_->model, tensor);
}

void HfTarget::discard_full() noexcept {
  if (!full_) return;
  full_->model.clear();
  store_.remove_tree(full_->directory);
  full_.reset();
}

Status HfTarget::commit_full(TargetState state) {
  if (!full_) return Error(Errc::invalid_argument, "no full update is open");
  DS_TRY(check_state(*layout_, state));
  const std::filesystem::path incoming = full_->directory;
  const bool lost_live = full_->lost_live;
  full_.reset();  // unmaps
  DS_TRY(make_current(incoming, std::move(state)));
  can_rollback_ = !lost_live;
  return {};
}

// ---- delta ---------------------------------------------------------------------------------------------------------

Status HfTarget::patch(const std::vector<PatchFile>& files, std::vector<const StagedStep*> steps,
                       std::vector<std::uint64_t> digests, const TargetState& after, std::function<bool()> go_on,
                       Deadline deadline) {
  DS_TRY(
      patch_files({*layout_, store_.places(), files, std::move(steps), std::move(go_on), deadline}, digests, *pool_));
  if (digests != after.digests) return Error(Errc::corrupt, "the patched files have other digests than the update");
  return {};
}

/// The version before, patched forward in a directory of its own; nothing if it cannot be used. It is gone in any case
/// in which something was begun.
Result<std::optional<std::filesystem::path>> HfTarget::patch_previous(const std::vector<StagedStep>& steps,
                                                                      const TargetState& state, Deadline deadline) {
  using Nothing = std::optional<std::filesystem::path>;
  if (!previous_ || previous_->steps.empty() || !leases_work_) return Nothing();
  WriteLeases leases;
  const auto lease_state = WriteLeases::acquire(store_.weight_paths(store_.directory(previous_->name)), leases);
  if (!lease_state.ok()) return Nothing();
  if (*lease_state == LeaseState::unsupported) {
    leases_work_ = false;
    spdlog::warn("hf_target no_write_leases path={} effect=\"each version is written anew\"",
                 store_.directory(previous_->name).string());
  }
  if (*lease_state != LeaseState::held) return Nothing();

  const Previous base = std::move(*previous_);
  previous_.reset();
  auto incoming = store_.take_apart(base.name);
  if (!incoming.ok()) {
    spdlog::warn("hf_target cannot_patch name={} error=\"{}\"", base.name, incoming.error().to_string());
    return Nothing();
  }
  const std::vector<std::filesystem::path> paths = store_.weight_paths(*incoming);
  std::vector<PatchFile> files;
  for (std::size_t i = 0; i < paths.size(); ++i) files.push_back({leases.fd(i), paths[i]});
  std::vector<const StagedStep*> all;
  for (const StagedStep& step : base.steps) all.push_back(&step);
  for (const StagedStep& step : steps) all.push_back(&step);
  Status status = patch(
      files, std::move(all), base.state.digests, state, [&] { return leases.unbroken(); }, deadline);
  if (status.ok()) return Nothing(*std::move(incoming));

  // Who waits in open() for one of these files must not get a mixture: it finds an empty file.
  for (std::size_t i = 0; i < leases.size(); ++i) {
    if (ftruncate(leases.fd(i), 0) != 0) spdlog::warn("hf_target cannot_truncate path={}", paths[i].string());
  }
  store_.remove_tree(*incoming);
  if (status.error().code() == Errc::timed_out) return std::move(status).error();
  spdlog::warn("hf_target gives_up_patching name={} reason=\"{}\"", base.name, status.error().to_string());
  return Nothing();
}

/// Written, not cloned and not by copy_file_range: blocks shared with another file would have to be allocated when they
/// are patched, on a disk that may be full by then.
Status HfTarget::copy_committed(const std::vector<UniqueFd>& files, const std::vector<std::filesystem::path>& paths,
                                Deadline deadline) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    const ByteSpan from = live_[i].bytes();
    const std::uint64_t pieces = (from.size() + kCopyPieceBytes - 1) / kCopyPieceBytes;
    DS_TRY(run_all(*pool_, pieces, deadline, "copying " + paths[i].string(), [&](std::uint64_t piece, unsigned) {
      const std::uint64_t at = piece * kCopyPieceBytes;
      return write_at(files[i].get(), at, from.subspan(at, std::min<std::uint64_t>(kCopyPieceBytes, from.size() - at)),
                      paths[i]);
    }));
  }
  return {};
}

Result<std::filesystem::path> HfTarget::write_anew(const std::vector<StagedStep>& steps, const TargetState& state,
                                                   Deadline deadline) {
  DS_ASSIGN(std::filesystem::path incoming, store_.make_incoming());
  const std::vector<std::filesystem::path> paths = store_.weight_paths(incoming);
  const auto fill = [&]() -> Status {
    DS_TRY(store_.write_other_files(incoming));
    DS_ASSIGN(const std::vector<UniqueFd> fds, store_.create_weight_files(incoming));
    DS_TRY(copy_committed(fds, paths, deadline));
    std::vector<PatchFile> files;
    files.reserve(paths.size());
    for (std::size_t i = 0; i < paths.size(); ++i) files.push_back({fds[i].get(), paths[i]});
    std::vector<const StagedStep*> all;
    all.reserve(steps.size());
    for (const StagedStep& step : steps) all.push_back(&step);
    return patch(
        files, std::move(all), committed_->digests, state, [] { return true; }, deadline);
  };
  if (Status status = fill(); !status.ok()) {
    store_.remove_tree(incoming);
    return std::move(status).error();
  }
  return incoming;
}

Status HfTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_) return Error(Errc::invalid_argument, "a full update is open");
  DS_TRY(check_steps(*layout_, committed(), steps, state));
  can_rollback_ = false;
  DS_ASSIGN(std::optional<std::filesystem::path> incoming, patch_previous(steps, state, deadline));
  if (!incoming) {
    DS_ASSIGN(incoming, with_room([&] { return write_anew(steps, state, deadline); }));
  }
  DS_TRY(make_current(*incoming, std::move(state)));
  if (memory_of(steps) <= std::max(kKeptBytesMin, layout_->model_bytes() / kKeptModelFraction)) {
    previous_->steps = std::move(steps);
  }
  return {};
}

// ---- commit and rollback -------------------------------------------------------------------------------------------

/// The directory gets its name and becomes the committed version. On error it is removed and all is as before.
Status HfTarget::make_current(const std::filesystem::path& incoming, TargetState state) {
  auto model = store_.map(incoming, /*writable=*/false);
  if (!model.ok()) {
    store_.remove_tree(incoming);
    return std::move(model).error();
  }
  DS_ASSIGN(std::string name, store_.publish(incoming, state));
  if (Status status = store_.point_current(name); !status.ok()) {
    model->clear();
    store_.remove_version(name);
    return std::move(status).error();
  }
  previous_.reset();
  if (committed_) previous_ = Previous{std::move(name_), *std::move(committed_), {}};
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
  if (committed_) {
    keep.insert(name_);
  } else if (const auto served = store_.current()) {
    keep.insert(*served);  // no base for us, but engines load it
  }
  store_.remove_unused(keep);
}

Status HfTarget::rollback() {
  if (full_) return Error(Errc::invalid_argument, "a full update is open");
  if (!can_rollback_) return Error(Errc::unsupported, "there is no commit that could be taken back");
  if (!previous_) {  // the first version: before it there was nothing
    DS_TRY(store_.clear_current());
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

}  // namespace

Result<TargetPtr> make_hf_target(LayoutPtr layout, Sidecar sidecar, std::filesystem::path out,
                                 HfTargetOptions options) {
  auto store = HfStore::open(layout, std::move(sidecar), std::move(out), options);
  if (!store.ok()) return std::move(store).error().with_context("directory target");
  return TargetPtr(new HfTarget(std::move(layout), *std::move(store)));
}

}  // namespace deltasync
