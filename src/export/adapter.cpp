#include "export/adapter.hpp"

namespace deltasync::exporting {
namespace {

constexpr std::string_view kAdapter = ".adapter.";
constexpr std::string_view kOfPart = "adapter_";
constexpr std::string_view kIn = "linear_in.weight";
constexpr std::string_view kOut = "linear_out.weight";
constexpr std::string_view kWeight = ".weight";

}  // namespace

std::optional<AdapterName> adapter_of(std::string_view name) {
  const std::size_t at = name.find(kAdapter);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = name.substr(at + kAdapter.size());
  AdapterName out;
  if (rest.starts_with(kOfPart)) {
    const std::size_t end = rest.find('.');
    if (end == std::string_view::npos) return std::nullopt;
    out.part = rest.substr(kOfPart.size(), end - kOfPart.size());
    rest.remove_prefix(end + 1);
  }
  out.base = std::string(name.substr(0, at)) + std::string(kWeight);
  out.in = rest == kIn;
  if (out.in) return out;
  if (!rest.starts_with(kOut)) return std::nullopt;
  out.base += rest.substr(kOut.size());
  return out;
}

std::optional<std::string> adapter_on_disk(std::string_view weight, const AdapterName& adapter) {
  if (!weight.ends_with(kWeight)) return std::nullopt;
  weight.remove_suffix(kWeight.size());
  return "base_model.model." + std::string(weight) + (adapter.in ? ".lora_A" : ".lora_B") + std::string(kWeight);
}

}  // namespace deltasync::exporting
