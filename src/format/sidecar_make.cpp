// A sidecar for layouts that come from memory instead of a directory.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/safetensors.hpp"

namespace deltasync {
namespace {

/// Widest elements first, as the safetensors library orders them: every tensor is then aligned to its element.
std::vector<std::uint32_t> file_order(const Layout& layout) {
  std::vector<std::uint32_t> order(layout.tensors().size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return layout.tensors()[a].element_bytes > layout.tensors()[b].element_bytes;
  });
  return order;
}

/// Fills files with tensors; a further file begins only where a header is full.
std::vector<Sidecar::File> split(const Layout& layout) {
  std::vector<Sidecar::File> files(1);
  safetensors::HeaderBuilder header;
  for (const auto index : file_order(layout)) {
    const Tensor& tensor = layout.tensors()[index];
    if (!header.add(tensor)) {
      files.back().bytes = header.finish();
      header = safetensors::HeaderBuilder();
      files.emplace_back();
      (void)header.add(tensor);  // one tensor always fits
    }
    files.back().tensors.push_back(index);
  }
  files.back().bytes = header.finish();
  return files;
}

Sidecar::File make_index(const Layout& layout, const std::vector<Sidecar::File>& files) {
  std::string json = R"({"metadata":{"total_size":)" + std::to_string(layout.model_bytes()) + R"(},"weight_map":{)";
  const char* comma = "";
  for (const auto& file : files) {
    for (const auto index : file.tensors) {
      json += comma;
      json += safetensors::json_string(layout.tensors()[index].spec.name);
      json += ":\"" + file.name + "\"";
      comma = ",";
    }
  }
  json += "}}\n";
  const auto bytes = bytes_of(std::string_view(json));
  return {"model.safetensors.index.json", {bytes.begin(), bytes.end()}};
}

}  // namespace

Sidecar make_sidecar(const Layout& layout) {
  Sidecar sidecar;
  sidecar.weights = split(layout);
  const auto count = sidecar.weights.size();
  if (count == 1) {
    sidecar.weights[0].name = "model.safetensors";
    return sidecar;
  }
  for (std::size_t i = 0; i < count; ++i) {
    char name[64];
    std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, count);
    sidecar.weights[i].name = name;
  }
  sidecar.others.push_back(make_index(layout, sidecar.weights));
  return sidecar;
}

}  // namespace deltasync
