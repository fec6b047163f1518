#include <atomic>

#include "shm/cells.hpp"
#include "shm/info.hpp"
#include "shm/roles.hpp"

namespace deltasync::shm {

HalfStatus inspect_half(Segment& segment, unsigned half) {
  Cells cells(segment);
  HalfStatus status;
  // The state may move while the info is read; a few looks at most, then the info is left out.
  for (int attempt = 0; attempt < 8; ++attempt) {
    const auto word = cells.load(cells.half_state(half));
    const auto now = HalfWord::unpack(word);
    InfoWords info;
    for (unsigned w = 0; w < kInfoWords; ++w) info[w] = cells.load(cells.half_info(half, w));
    status = {now.code, now.sequence, {}, 0};
    if (cells.load(cells.half_state(half)) != word) continue;
    if (now.code == HalfState::filling || holds_version(now.code)) {
      status.version = to_version(info);
      status.writers = static_cast<unsigned>(info[kInfoWriters]);
    }
    break;
  }
  return status;
}

Version inspect_newest(Segment& segment) {
  HalfStatus newest;
  for (unsigned half = 0; half < kHalves; ++half) {
    HalfStatus status = inspect_half(segment, half);
    if (holds_version(status.state) && status.sequence >= newest.sequence) newest = std::move(status);
  }
  return newest.version;
}

bool still_holds(Segment& segment, unsigned half, std::uint64_t sequence) {
  // SYNC POINT given back (acquire): what the caller read before is read before the state is. Without it bytes of a
  // later fill could be taken for this one's.
  std::atomic_thread_fence(std::memory_order_acquire);
  Cells cells(segment);
  return Protocol<Cells>(cells).holds(half, sequence);
}

SlotStatus inspect_slot(Segment& segment, unsigned slot) {
  auto& block = segment.control();
  const auto phase = PhaseWord::unpack(Cells::load(&block.slot[slot].phase));
  SlotStatus status;
  status.pid = static_cast<std::int32_t>(Cells::load(&block.owner[slot].pid));
  status.phase = phase.code;
  status.sequence = phase.sequence;
  status.waiting = Cells::load(&block.slot[slot].request_deadline_ns) != 0;
  return status;
}

std::uint64_t inspect_progress(Segment& segment, unsigned half, std::uint64_t sequence) {
  Cells cells(segment);
  Protocol<Cells> protocol(cells);
  std::uint64_t elements = 0;
  for (std::uint64_t b = 0; b < segment.batches(); ++b) elements += protocol.elements_done(half, b, sequence);
  return elements;
}

ProcessId inspect_agent(Segment& segment) {
  auto& agent = segment.control().agent;
  return {static_cast<std::int32_t>(Cells::load(&agent.pid)), Cells::load(&agent.start_ticks)};
}

std::string describe_half(Segment& segment, unsigned half) {
  const auto status = inspect_half(segment, half);
  auto text = "half " + std::to_string(half) + " is " + std::string(to_string(status.state));
  if (status.version.id.valid()) text += " (" + to_string(status.version) + ")";
  if (status.state == HalfState::quarantined) {
    bool inside = false;
    for (unsigned k = 0; k < kSlotsMax; ++k) {
      const auto slot = inspect_slot(segment, k);
      if (slot.phase == Phase::copying && slot.sequence == status.sequence) {
        text += ", pid " + std::to_string(slot.pid) + " (writer " + std::to_string(k) + ") is inside a copy";
        inside = true;
      }
    }
    if (!inside) text += ", its agent (" + to_string(inspect_agent(segment)) + ") has not given it back";
  }
  return text;
}

}  // namespace deltasync::shm
