// Which tensors of a model directory are quantised: those that are F8_E4M3 and have a tensor of scales. What
// config.json says of it (quantization_config) has to agree.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "export/plan.hpp"

namespace deltasync::exporting {

struct Quantisation {
  std::vector<QuantisedTensor> tensors;    ///< in the layout's order
  std::vector<std::uint32_t> activations;  ///< tensors with scales of what layers read, by the layout
};

/// fp8 in blocks of two dimensions, with scales in F32, BF16 or F8_E8M0; and with one scale for the tensor, as
/// quant_method fp8 and compressed-tensors have it.
///   - Errc::unsupported: another format; the message names it.
///   - Errc::layout_mismatch: config.json and directory disagree, or a tensor has no scales that fit it, by name.
Result<Quantisation> quantisation_of(const nlohmann::json& config, const Layout& layout);

}  // namespace deltasync::exporting
