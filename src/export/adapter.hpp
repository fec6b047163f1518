// Adapters (LoRA) that Megatron-Bridge puts around a module: their rows are those of the module's weight, and their
// names on disk are peft's.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace deltasync::exporting {

/// A tensor of an adapter.
struct AdapterName {
  std::string base;  ///< the module's weight; of gate or up alone, if it is that: `….linear_fc1.weight_w`
  std::string part;  ///< that has the adapter for itself (canonical LoRA); empty: all parts have it together
  bool in = false;   ///< lora_A, which has nothing of the module's rows

  /// Whether the tensor is not cut into parts as the module's weight is.
  bool whole() const { return in || !part.empty(); }
};

/// Of `PATH.adapter.linear_out.weight` or `PATH.adapter.adapter_q.linear_in.weight`; nothing for other names.
std::optional<AdapterName> adapter_of(std::string_view name);

/// What peft calls it, of a weight that is called so in the base model's directory; nothing if that is no `….weight`.
std::optional<std::string> adapter_on_disk(std::string_view weight, const AdapterName& adapter);

}  // namespace deltasync::exporting
