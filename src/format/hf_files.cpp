#include "format/hf_files.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <system_error>

#include "format/file_name.hpp"
#include "format/mapped_file.hpp"

namespace deltasync {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::uint64_t kIndexBytesMax = 512u << 20;
/// Weights in other formats: copies of what the safetensors files hold, which would go stale with the first update.
constexpr std::array<std::string_view, 12> kForeignWeights = {
    ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".npz", ".tflite", ".safetensors"};

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

Error walk_error(const fs::path& dir, const std::error_code& error) {
  return Error::from_errno("read directory " + dir.string(), error.value());
}

Result<WeightFileList> read_index(const fs::path& path) {
  DS_ASSIGN(const auto bytes, read_file(path, kIndexBytesMax));
  return parse_weight_index({reinterpret_cast<const char*>(bytes.data()), bytes.size()}).with_context(path.string());
}

Result<WeightFileList> list_safetensors(const fs::path& dir) {
  std::error_code error;
  WeightFileList list;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const auto& path = it->path();
    if (path.extension() == ".safetensors" && check_file_name(path.filename().string())) {
      list.files.push_back(path.filename().string());
    }
  }
  if (error) return walk_error(dir, error);
  if (list.files.empty()) return Error(Errc::not_found, dir.string() + ": no safetensors file");
  std::sort(list.files.begin(), list.files.end());
  return list;
}

/// Relative names of all files that belong to the model, but for the weights.
Result<std::vector<std::string>> list_others(const fs::path& dir) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::recursive_directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const auto base = it->path().filename().string();
    std::error_code ignored;
    if (base.empty() || base.front() == '.') {
      if (it->is_directory(ignored)) it.disable_recursion_pending();
      continue;
    }
    const auto extension = it->path().extension().string();
    if (std::find(kForeignWeights.begin(), kForeignWeights.end(), extension) != kForeignWeights.end()) continue;
    if (!it->is_regular_file(ignored)) continue;
    auto name = it->path().lexically_relative(dir).generic_string();
    DS_TRY(check_file_name(name).with_context(dir.string()));
    names.push_back(std::move(name));
  }
  if (error) return walk_error(dir, error);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

Result<WeightFileList> parse_weight_index(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return Error(Errc::corrupt, "has no weight_map");
  }
  WeightFileList list;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) return Error(Errc::corrupt, "tensor '" + tensor + "' has no file name");
    list.indexed.push_back({tensor, file.get<std::string>()});
    list.files.push_back(list.indexed.back().file);
  }
  std::sort(list.files.begin(), list.files.end());
  list.files.erase(std::unique(list.files.begin(), list.files.end()), list.files.end());
  for (const auto& name : list.files) {
    if (auto status = check_file_name(name); !status) return Error(Errc::corrupt, status.error().message());
  }
  if (list.files.empty()) return Error(Errc::corrupt, "its weight_map is empty");
  return list;
}

Result<WeightFileList> find_weight_files(const fs::path& dir) {
  if (is_there(dir / kSingleFile)) return WeightFileList{{kSingleFile}, {}};
  if (is_there(dir / kIndexFile)) return read_index(dir / kIndexFile);
  return list_safetensors(dir);
}

Result<std::vector<Sidecar::File>> read_other_files(const fs::path& dir, const std::vector<std::string>& weights,
                                                    std::uint64_t bytes_max) {
  DS_ASSIGN(const auto names, list_others(dir));
  std::vector<Sidecar::File> others;
  for (const auto& name : names) {
    if (std::find(weights.begin(), weights.end(), name) != weights.end()) continue;  // an index may name any file
    auto bytes = read_file(dir / name, bytes_max);
    if (!bytes && bytes.error().code() == Errc::no_space) continue;  // too large to be metadata
    if (!bytes) return std::move(bytes).error();
    others.push_back({name, std::move(bytes).value()});
  }
  return others;
}

}  // namespace deltasync
