// What a pull asks for, as the wire says it.
#pragma once

#include "deltasync/receiver.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

/// A number goes before a label: pull() refuses both together.
inline WantKind kind_of(const Want& want) noexcept {
  if (want.number) return WantKind::number;
  if (!want.label.empty()) return WantKind::label;
  return want.newer ? WantKind::newer : WantKind::newest;
}

}  // namespace deltasync::wire
