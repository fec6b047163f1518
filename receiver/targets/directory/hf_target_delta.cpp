// Deltas of the HF directory target: the version before the committed one is patched forward, or a new directory is
// written.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "receiver/targets/directory/file_lease.hpp"
#include "receiver/targets/directory/hf_target.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kCopyPieceBytes = 8u << 20;
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

}  // namespace

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
  FileLeases leases;
  const auto lease_state = FileLeases::acquire(store_.weight_paths(store_.directory(previous_->name)), leases);
  if (!lease_state.ok()) return Nothing();
  if (*lease_state == FileLeaseState::unsupported) {
    leases_work_ = false;
    log::warn(
        "hf_target no_write_leases path={} effect=\"each version is written again, and is removed after {} more, "
        "whether or not it is being loaded\" remedy=\"keep more of them (--keep-before)\"",
        store_.directory(previous_->name).string(), store_.keep_before());
  }
  if (*lease_state != FileLeaseState::held) return Nothing();

  const Previous base = std::move(*previous_);
  previous_.reset();
  auto incoming = store_.take_apart(base.name);
  if (!incoming.ok()) {
    log::warn("hf_target cannot_patch name={} error=\"{}\"", base.name, incoming.error().to_string());
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
    if (ftruncate(leases.fd(i), 0) != 0) log::warn("hf_target cannot_truncate path={}", paths[i].string());
  }
  remove_tree(*incoming);
  if (status.error().code() == Errc::timed_out) return std::move(status).error();
  log::warn("hf_target gives_up_patching name={} reason=\"{}\"", base.name, status.error().to_string());
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

Result<std::filesystem::path> HfTarget::write_again(const std::vector<StagedStep>& steps, const TargetState& state,
                                                    Deadline deadline) {
  DS_TRY(store_.check_room());
  DS_ASSIGN(std::filesystem::path incoming, store_.make_incoming());
  const std::vector<std::filesystem::path> paths = store_.weight_paths(incoming);
  const auto fill = [&]() -> Status {
    DS_TRY(store_.write_other_files(incoming, deadline));
    DS_ASSIGN(const std::vector<UniqueFd> fds, store_.create_weight_files(incoming, deadline));
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
    remove_tree(incoming);
    return std::move(status).error();
  }
  return incoming;
}

Status HfTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_) return Error(Errc::invalid_argument, "a full update is open");
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  DS_TRY(check_steps(*layout_, TileSet::whole(*layout_), committed(), steps, state, *pool_));
  can_rollback_ = false;
  DS_ASSIGN(std::optional<std::filesystem::path> incoming, patch_previous(steps, state, deadline));
  if (!incoming) {
    DS_ASSIGN(incoming, with_room([&] { return write_again(steps, state, deadline); }));
  }
  DS_TRY(make_current(*incoming, std::move(state)));
  if (store_.keep_before() > 1) return {};  // it stays as it is
  if (memory_of(steps) <= std::max(kKeptBytesMin, layout_->model_bytes() / kKeptModelFraction)) {
    previous_->steps = std::move(steps);
  }
  return {};
}

}  // namespace deltasync
