#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "receiver/targets/device/device_executor.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kListAlignment = 64;

std::uint64_t list_aligned(std::uint64_t bytes) {
  return (bytes + kListAlignment - 1) / kListAlignment * kListAlignment;
}

}  // namespace

WordBatch::~WordBatch() {
  for (Upload& upload : uploads_) {
    // Nothing may still use it. A stream that does not end keeps it.
    DeviceExecutor::Part& part = *upload.part;
    const std::lock_guard lock(part.mutex);
    Status idle = part.stream->record(*part.event);
    if (idle.ok()) idle = gpu::wait(*part.event, executor_->patient(), "giving back an update's changes");
    if (!idle.ok()) upload.memory.abandon();
  }
}

void WordBatch::add(std::uint64_t rank, std::uint32_t count, std::span<const std::byte> changes) {
  if (count != 0) added_.push_back({rank, count, changes});
}

void WordBatch::add(const ChangesOnDevices& kept) {
  for (const ChangesOnDevices::InRoom& in : kept.rooms) kept_.push_back(&in);
}

Status WordBatch::upload(const CallContext& until) {
  for (std::uint32_t i = 0; i < executor_->parts_.size(); ++i) DS_TRY(upload_to(*executor_->parts_[i], i, until));
  added_.clear();
  added_.shrink_to_fit();
  join_rooms();
  return {};
}

/// Rooms whose pieces follow each other are one launch: all of a block, but where a frame was given up between them.
void WordBatch::join_rooms() {
  std::sort(kept_.begin(), kept_.end(), [](const auto* a, const auto* b) {
    if (a->part != b->part) return a->part < b->part;
    if (a->room.base() != b->room.base()) return std::less<>()(a->room.base(), b->room.base());
    return a->room.pieces_at() < b->room.pieces_at();
  });
  const std::byte* end = nullptr;  // of the pieces before
  for (const ChangesOnDevices::InRoom* in : kept_) {
    DeviceExecutor::Part& part = *executor_->parts_[in->part];
    std::byte* const base = in->room.base();
    const std::byte* const pieces = base + in->room.pieces_at();
    const bool follows = end == pieces && !launches_.empty() && launches_.back().part == &part &&
                         launches_.back().kernel.changes == base;
    if (follows) {
      launches_.back().kernel.count += in->room.pieces();
    } else {
      launches_.push_back({&part,
                           {part.table, reinterpret_cast<const gpu::WordRun*>(base),
                            reinterpret_cast<const gpu::WordPiece*>(pieces), base, in->room.pieces()},
                           false});
    }
    end = pieces + in->room.pieces() * sizeof(gpu::WordPiece);
  }
  kept_.clear();
}

/// One block of the device's memory: the changes of all runs, then the runs, then the pieces.
Status WordBatch::upload_to(DeviceExecutor::Part& part, std::uint32_t index, const CallContext& until) {
  std::vector<gpu::WordRun> runs;
  std::vector<gpu::WordPiece> pieces;
  std::vector<const Added*> of_run;
  std::uint64_t bytes = 0;
  for (const Added& added : added_) {
    if ((executor_->places_[added.rank] >> index & 1) == 0) continue;
    for (std::uint32_t first = 0; first < added.count; first += gpu::kBlockWords) {
      pieces.push_back({static_cast<std::uint32_t>(runs.size()), first});
    }
    runs.push_back({added.rank, bytes, added.count, gpu::ChangeKind::elements});
    of_run.push_back(&added);
    bytes += gpu::WordRun::bytes(added.count, executor_->shape_.tiles[added.rank].element_bytes);
  }
  if (runs.empty()) return {};
  const std::uint64_t runs_at = list_aligned(bytes);
  const std::uint64_t pieces_at = list_aligned(runs_at + runs.size() * sizeof(gpu::WordRun));
  const std::uint64_t all = pieces_at + pieces.size() * sizeof(gpu::WordPiece);
  auto memory = part.device->allocate(all);
  if (!memory.ok()) return std::move(memory).error().with_context("an update's changes");
  uploads_.push_back({&part, *std::move(memory)});
  std::byte* const base = uploads_.back().memory.data();

  // Runs are packed into as few uploads as staging allows.
  std::vector<std::byte> packed;
  std::uint64_t packed_at = 0;
  const auto flush = [&]() -> Status {
    DS_TRY(executor_->upload(part, base + packed_at, packed, executor_->patient(until)));
    packed_at += packed.size();
    packed.clear();
    return {};
  };
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Added& added = *of_run[i];
    const std::size_t at = packed.size();
    const std::size_t positions = std::size_t{added.count} * sizeof(std::uint16_t);
    const std::uint32_t width = executor_->shape_.tiles[added.rank].element_bytes;
    packed.resize(at + static_cast<std::size_t>(gpu::WordRun::bytes(added.count, width)));
    std::memcpy(packed.data() + at, added.changes.data(), positions);
    std::memcpy(packed.data() + at + gpu::WordRun::numbers_at(added.count), added.changes.data() + positions,
                added.changes.size() - positions);
    if (packed.size() >= executor_->slot_bytes_) DS_TRY(flush());
  }
  DS_TRY(flush());
  DS_TRY(executor_->upload(part, base + runs_at, std::as_bytes(std::span(runs)), executor_->patient(until)));
  DS_TRY(executor_->upload(part, base + pieces_at, std::as_bytes(std::span(pieces)), executor_->patient(until)));
  launches_.push_back({&part,
                       {part.table, reinterpret_cast<const gpu::WordRun*>(base + runs_at),
                        reinterpret_cast<const gpu::WordPiece*>(base + pieces_at), base, pieces.size()},
                       false});
  return {};
}

Status WordBatch::exchange(const CallContext& until) {
  for (Launch& launch : launches_) {
    const std::lock_guard lock(launch.part->mutex);
    DS_TRY(launch.part->stream->launch(launch.kernel));
    launch.done = true;
  }
  return executor_->finish(until);
}

Status WordBatch::exchange_back(const CallContext& until) {
  for (Launch& launch : launches_) {
    if (!launch.done) continue;
    const std::lock_guard lock(launch.part->mutex);
    DS_TRY(launch.part->stream->launch(launch.kernel));
    launch.done = false;
  }
  return executor_->finish(until);
}

}  // namespace deltasync
