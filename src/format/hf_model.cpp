// Opening a model directory: weight files are mapped and their headers become the layout, all else the sidecar.
#include <algorithm>
#include <cassert>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/file_name.hpp"
#include "format/hf_files.hpp"
#include "format/mapped_file.hpp"
#include "format/safetensors.hpp"

namespace deltasync {

struct HfModel::Mapping {
  MappedFile file;
};

namespace {

/// One weight file, mapped and parsed.
struct ParsedFile {
  MappedFile file;
  std::uint64_t header_bytes = 0;
  std::vector<safetensors::Entry> entries;
};

Result<ParsedFile> parse_file(const std::filesystem::path& path) {
  ParsedFile parsed;
  DS_ASSIGN(parsed.file, MappedFile::open(path));
  const ByteSpan bytes = parsed.file.bytes();
  auto header_bytes = safetensors::header_bytes(bytes, bytes.size()).with_context(path.string());
  if (!header_bytes) return std::move(header_bytes).error();
  parsed.header_bytes = *header_bytes;
  auto entries = safetensors::parse_header(bytes.first(parsed.header_bytes), bytes.size() - parsed.header_bytes)
                     .with_context(path.string());
  if (!entries) return std::move(entries).error();
  parsed.entries = std::move(entries).value();
  return parsed;
}

/// Loaders trust the index, so it must be true; files may hold tensors that it does not name.
Status check_index(const WeightFileList& list, const std::vector<ParsedFile>& parsed) {
  std::vector<std::pair<std::string_view, std::string_view>> present;
  for (std::size_t f = 0; f < parsed.size(); ++f) {
    for (const auto& e : parsed[f].entries) present.emplace_back(e.name, list.files[f]);
  }
  std::sort(present.begin(), present.end());
  for (const auto& item : list.indexed) {
    const std::pair<std::string_view, std::string_view> wanted(item.tensor, item.file);
    if (!std::binary_search(present.begin(), present.end(), wanted)) {
      return Error(Errc::corrupt,
                   "the index says that " + item.file + " holds tensor '" + item.tensor + "', but it does not");
    }
  }
  return {};
}

}  // namespace

HfModel::HfModel() = default;
HfModel::HfModel(HfModel&&) noexcept = default;
HfModel& HfModel::operator=(HfModel&&) noexcept = default;
HfModel::~HfModel() = default;

std::span<const std::byte> HfModel::tensor(std::uint32_t index) const {
  assert(index < tensors_.size());
  return tensors_[index];
}

Result<HfModel> HfModel::open(const std::filesystem::path& dir, std::uint64_t tensor_parallel,
                              std::uint64_t other_file_bytes_max) {
  DS_ASSIGN(const auto list, find_weight_files(dir));
  std::vector<ParsedFile> parsed;
  for (const auto& name : list.files) {
    DS_ASSIGN(auto file, parse_file(dir / name));
    parsed.push_back(std::move(file));
  }
  DS_TRY(check_index(list, parsed).with_context(dir.string()));

  HfModel model;
  std::vector<TensorSpec> specs;
  for (std::size_t f = 0; f < parsed.size(); ++f) {
    const ByteSpan bytes = parsed[f].file.bytes();
    const ByteSpan header = bytes.first(parsed[f].header_bytes);
    Sidecar::File weights{list.files[f], {header.begin(), header.end()}, {}};
    for (auto& e : parsed[f].entries) {
      weights.tensors.push_back(static_cast<std::uint32_t>(specs.size()));
      model.tensors_.push_back(bytes.subspan(parsed[f].header_bytes + e.begin, e.end - e.begin));
      specs.push_back({std::move(e.name), e.dtype, std::move(e.shape), {}, {}});
    }
    model.sidecar_.weights.push_back(std::move(weights));
    model.files_.push_back(std::make_unique<Mapping>(Mapping{std::move(parsed[f].file)}));
  }
  add_even_cuts(specs, tensor_parallel);
  auto layout = Layout::build(std::move(specs)).with_context(dir.string());
  if (!layout) return std::move(layout).error();
  model.layout_ = std::move(layout).value();
  DS_ASSIGN(model.sidecar_.others, read_other_files(dir, list.files, other_file_bytes_max));
  return model;
}

}  // namespace deltasync
