#include <algorithm>
#include <cstring>
#include <utility>

#include "receiver/device_executor.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kListAlignment = 64;

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kListAlignment - 1) / kListAlignment * kListAlignment;
}

}  // namespace

WordBatch::~WordBatch() {
  for (OnPart& on : on_) {
    if (!on.memory) continue;
    // Nothing may still use it. A stream that does not end keeps it.
    DeviceExecutor::Part& part = *on.part;
    const std::lock_guard lock(part.mutex);
    Status idle = part.stream->record(*part.event);
    if (idle.ok()) idle = gpu::wait(*part.event, executor_->patient(), "giving back an update's changes");
    if (!idle.ok()) on.memory.abandon();
  }
}

void WordBatch::add(std::uint64_t rank, std::uint32_t count, std::span<const std::byte> changes) {
  if (count != 0) added_.push_back({rank, count, changes});
}

std::uint64_t WordBatch::bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const OnPart& on : on_) bytes += on.memory.bytes();
  return bytes;
}

Status WordBatch::upload(const Until& until) {
  for (std::uint32_t i = 0; i < executor_->parts_.size(); ++i) DS_TRY(upload_to(*executor_->parts_[i], i, until));
  added_.clear();
  added_.shrink_to_fit();
  return {};
}

/// One block of the device's memory: the changes of all runs, then the runs, then the pieces.
Status WordBatch::upload_to(DeviceExecutor::Part& part, std::uint32_t index, const Until& until) {
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
  const std::uint64_t runs_at = aligned(bytes);
  const std::uint64_t pieces_at = aligned(runs_at + runs.size() * sizeof(gpu::WordRun));
  const std::uint64_t all = pieces_at + pieces.size() * sizeof(gpu::WordPiece);
  auto memory = part.device->allocate(all);
  if (!memory.ok()) return std::move(memory).error().with_context("an update's changes");
  on_.push_back({&part, *std::move(memory), {}, false});
  std::byte* const base = on_.back().memory.data();

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
  on_.back().kernel = {part.table, reinterpret_cast<const gpu::WordRun*>(base + runs_at),
                       reinterpret_cast<const gpu::WordPiece*>(base + pieces_at), base, pieces.size()};
  return {};
}

Status WordBatch::exchange(const Until& until) {
  for (OnPart& on : on_) {
    const std::lock_guard lock(on.part->mutex);
    DS_TRY(on.part->stream->launch(on.kernel));
    on.launched = true;
  }
  return executor_->finish(until);
}

Status WordBatch::exchange_back(const Until& until) {
  for (OnPart& on : on_) {
    if (!on.launched) continue;
    const std::lock_guard lock(on.part->mutex);
    DS_TRY(on.part->stream->launch(on.kernel));
    on.launched = false;
  }
  return executor_->finish(until);
}

}  // namespace deltasync
