#include "tests/gpu/emulator/races.hpp"

#include <algorithm>

namespace deltasync::emulator {

std::string_view Races::read(Cell& cell, Id id, bool constant) {
  if (cell.writer != 0) {
    if (constant) return "race: ld.global.nc reads what this launch has written";
    if (!ordered(cell.writer, id)) return "race: reads what another thread of this launch has written";
  }
  cell.is_constant |= constant;
  if (cell.reader != 0 && !same_thread(cell.reader, id)) {
    cell.many_blocks |= !same_block(cell.reader, id);
    // Who read before a barrier is ordered before all that comes behind it.
    cell.many_readers = cell.reader % (1 << 14) == id % (1 << 14) || cell.many_blocks;
  }
  cell.reader = id;
  return {};
}

std::string_view Races::write(Cell& cell, Id id, bool atomic) {
  if (cell.is_constant) return "race: writes what ld.global.nc has read";
  if (cell.writer != 0 && !ordered(cell.writer, id) && !(atomic && cell.is_atomic)) {
    return "race: writes what another thread of this launch has written";
  }
  if (cell.reader != 0) {
    const bool by_others = cell.many_readers && cell.reader % (1 << 14) == id % (1 << 14);
    if (cell.many_blocks || by_others || !ordered(cell.reader, id)) {
      return "race: writes what another thread of this launch has read";
    }
  }
  cell.writer = id;
  cell.is_atomic = atomic;
  return {};
}

Races::Page& Races::page(std::uintptr_t number) {
  if (number != last_page_) {
    auto& at = pages_[number];
    if (at == nullptr) at = std::make_unique<Page>();
    last_ = at.get();
    last_page_ = number;
  }
  return *last_;
}

std::string_view Races::touch(std::uintptr_t address, std::uint32_t bytes, std::uint32_t used, Kind kind,
                              Thread thread) {
  const Id id = (thread.block + 1) << 24 | std::uint64_t{thread.index} << 14 | std::min(thread.barriers, 0x3FFFu);
  Page& on = page(address / kPage);
  const std::uintptr_t first = address % kPage;
  const bool reads = kind == Kind::read || kind == Kind::read_constant;
  for (std::uint32_t i = 0; i < bytes;) {
    const std::uintptr_t word = (first + i) / kWord;
    const auto end = std::min(bytes, i + static_cast<std::uint32_t>(kWord - (first + i) % kWord));
    if (reads && on.settled[word]) {
      i = end;
      continue;
    }
    for (; i < end; ++i) {
      if ((used >> i & 1) == 0) continue;
      Cell& cell = on.cells[first + i];
      const std::string_view wrong =
          reads ? read(cell, id, kind == Kind::read_constant) : write(cell, id, kind == Kind::atomic);
      if (!wrong.empty()) return wrong;
    }
    const Cell* const cells = &on.cells[word * kWord];
    const auto is_settled = [](const Cell& cell) { return cell.many_blocks && cell.writer == 0; };
    on.settled[word] = reads && is_settled(*cells) && std::all_of(cells, cells + kWord, is_settled);
  }
  return {};
}

}  // namespace deltasync::emulator
