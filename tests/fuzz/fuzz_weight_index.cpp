// The text of a model.safetensors.index.json. What is accepted names files inside the directory.
#include <cstdlib>
#include <string_view>

#include "format/file_name.hpp"
#include "format/hf_files.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const auto list = parse_weight_index({reinterpret_cast<const char*>(data), size});
  if (!list) return 0;
  if (list->files.empty() || list->indexed.empty()) std::abort();
  for (const auto& name : list->files) {
    if (!check_file_name(name)) std::abort();
  }
  return 0;
}
