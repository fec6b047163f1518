#include "tests/receiver/hf_fixture.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "base/bytes.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {
namespace fs = std::filesystem;

namespace {

/// A safetensors header without padding, and with one space more if its length would be even.
Sidecar::File weight_file(const Layout& layout, std::string name, std::vector<std::uint32_t> tensors) {
  nlohmann::ordered_json json;
  json["__metadata__"]["format"] = "pt";
  std::uint64_t at = 0;
  for (const std::uint32_t index : tensors) {
    const Tensor& tensor = layout.tensors()[index];
    auto& entry = json[tensor.spec.name];
    entry["dtype"] = std::string(to_string(tensor.spec.dtype));
    entry["shape"] = tensor.spec.shape;
    entry["data_offsets"] = {at, at + tensor.bytes};
    at += tensor.bytes;
  }
  std::string text = json.dump();
  if (text.size() % 2 == 0) text += ' ';
  Sidecar::File file{std::move(name), {}, std::move(tensors)};
  ByteWriter out(file.bytes);
  out.put<std::uint64_t>(text.size());
  out.append(bytes_of(std::string_view(text)));
  return file;
}

std::vector<std::byte> text_bytes(std::string_view text) {
  const ByteSpan bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

Sidecar awkward_sidecar(const Layout& layout) {
  std::vector<std::uint32_t> odd;
  std::vector<std::uint32_t> even;
  for (auto i = static_cast<std::uint32_t>(layout.tensors().size()); i-- > 0;) (i % 2 == 0 ? even : odd).push_back(i);
  Sidecar sidecar;
  sidecar.weights.push_back(weight_file(layout, "model-00001-of-00002.safetensors", std::move(odd)));
  sidecar.weights.push_back(weight_file(layout, "part two/model-00002-of-00002.safetensors", std::move(even)));
  sidecar.others.push_back({"config.json", text_bytes("{\"architectures\": []}\n")});
  sidecar.others.push_back({"tokenizer/vocab.txt", text_bytes("a\nb\n")});
  sidecar.others.push_back({"empty.txt", {}});
  return sidecar;
}

std::vector<std::byte> weight_file_bytes(const Layout& layout, const Sidecar::File& file,
                                         const std::vector<std::byte>& half) {
  std::vector<std::byte> bytes = file.bytes;
  for (const std::uint32_t index : file.tensors) {
    const Tensor& tensor = layout.tensors()[index];
    const auto first = half.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
    bytes.insert(bytes.end(), first, first + static_cast<std::ptrdiff_t>(tensor.bytes));
  }
  return bytes;
}

std::vector<std::byte> read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  std::vector<std::byte> bytes(in ? static_cast<std::size_t>(in.tellg()) : 0);
  in.seekg(0);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(in.gcount()));
  return bytes;
}

void write_file(const fs::path& path, const std::vector<std::byte>& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

std::string compare_directory(const fs::path& directory, const Layout& layout, const Sidecar& sidecar,
                              const std::vector<std::byte>& half) {
  std::set<fs::path> expected;
  for (const Sidecar::File& file : sidecar.weights) {
    expected.insert(file.name);
    if (!same_bytes(read_file(directory / file.name), weight_file_bytes(layout, file, half)))
      return file.name + " differs";
  }
  for (const Sidecar::File& file : sidecar.others) {
    expected.insert(file.name);
    if (!same_bytes(read_file(directory / file.name), file.bytes)) return file.name + " differs";
  }
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, fs::directory_options::follow_directory_symlink, error), end;
       !error && it != end; it.increment(error)) {
    if (it->is_directory()) continue;
    if (expected.erase(fs::relative(it->path(), directory)) == 0) return "unexpected file " + it->path().string();
  }
  if (error) return directory.string() + ": " + error.message();
  if (!expected.empty()) return "missing " + expected.begin()->string();
  return {};
}

}  // namespace deltasync::test
