// Model directories: which files count, that bytes are found where they are, that a directory can be written again
// bit for bit, and that Python's safetensors package reads what we write.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <random>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/hf_files.hpp"
#include "format/mapped_file.hpp"
#include "random_specs.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync {
namespace {

using test::TempDir;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::RandomSpecs;

std::vector<std::byte> safetensors_file(const std::string& json, std::string_view data) {
  std::vector<std::byte> file;
  ByteWriter out(file);
  out.put<std::uint64_t>(json.size());
  out.append(bytes_of(std::string_view(json)));
  out.append(bytes_of(data));
  return file;
}

/// A file with one U8 tensor.
std::vector<std::byte> one_tensor(const std::string& name, std::string_view data) {
  const auto n = std::to_string(data.size());
  return safetensors_file("{\"" + name + R"(":{"dtype":"U8","shape":[)" + n + R"(],"data_offsets":[0,)" + n + "]}}",
                          data);
}

std::string text_of(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::string> names_of(const Layout& layout) {
  std::vector<std::string> names;
  for (const auto& t : layout.tensors()) names.push_back(t.spec.name);
  return names;
}

void expect_refused(const TempDir& dir, Errc code, const std::string& text) {
  const auto model = HfModel::open(dir.path());
  ASSERT_FALSE(model.ok()) << "opened, expected: " << text;
  EXPECT_EQ(model.error().code(), code) << model.error().to_string();
  EXPECT_THAT(model.error().message(), HasSubstr(text));
  EXPECT_THAT(model.error().message(), HasSubstr(dir.path().string()));
}

TEST(HfModel, SingleFileComesFirstAndOthersAreKept) {
  const TempDir dir;
  dir.write("model.safetensors", safetensors_file(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]},)"
                                                  R"("a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}  )",
                                                  "abcde"));
  dir.write("unrelated.safetensors", "not even a safetensors file");
  dir.write("config.json", "{}");
  dir.write("1_Pooling/config.json", "pool");
  dir.write("pytorch_model.bin", "stale");
  dir.write(".cache/huggingface/x", "hidden");
  dir.write("large.txt", std::string(1000, 'x'));
  for (const auto& path : {dir.path(), dir.path() / "", dir.path() / "."}) {
    const auto model = HfModel::open(path, 1, 999);
    ASSERT_TRUE(model.ok()) << model.error().to_string();
    EXPECT_THAT(names_of(*model->layout()), ElementsAre("a", "b"));
    EXPECT_EQ(text_of(model->tensor(0)), "abc");
    EXPECT_EQ(text_of(model->tensor(1)), "de");
    const auto& others = model->sidecar().others;
    ASSERT_EQ(others.size(), 2u);
    EXPECT_EQ(others[0].name, "1_Pooling/config.json");
    EXPECT_EQ(text_of(others[0].bytes), "pool");
    EXPECT_EQ(others[1].name, "config.json");
  }
}

TEST(HfModel, ShardsOfAnIndexInNameOrder) {
  const TempDir dir;
  dir.write("model-00002-of-00002.safetensors", one_tensor("second", "22"));
  dir.write("model-00001-of-00002.safetensors", one_tensor("first", "1"));
  dir.write("extra.safetensors", one_tensor("extra", "e"));
  dir.write("model.safetensors.index.json",
            R"({"metadata":{},"weight_map":{"second":"model-00002-of-00002.safetensors",)"
            R"("first":"model-00001-of-00002.safetensors"}})");
  const auto model = HfModel::open(dir.path());
  ASSERT_TRUE(model.ok()) << model.error().to_string();
  EXPECT_THAT(names_of(*model->layout()), ElementsAre("first", "second"));
  EXPECT_EQ(model->sidecar().weights[1].name, "model-00002-of-00002.safetensors");
  ASSERT_EQ(model->sidecar().others.size(), 1u);
  EXPECT_EQ(model->sidecar().others[0].name, "model.safetensors.index.json");
}

TEST(HfModel, WithoutAnIndexEverySafetensorsFile) {
  const TempDir dir;
  dir.write("b.safetensors", one_tensor("y", "2"));
  dir.write("a.safetensors", one_tensor("z", "1"));
  const auto model = HfModel::open(dir.path());
  ASSERT_TRUE(model.ok()) << model.error().to_string();
  EXPECT_THAT(names_of(*model->layout()), ElementsAre("z", "y"));
}

TEST(HfModel, FollowsLinkedFilesAsModelCachesHaveThem) {
  const TempDir dir;
  dir.write("blobs/1234", one_tensor("w", "data"));
  std::filesystem::create_directories(dir.path() / "snapshot");
  std::filesystem::create_symlink("../blobs/1234", dir.path() / "snapshot" / "model.safetensors");
  const auto model = HfModel::open(dir.path() / "snapshot");
  ASSERT_TRUE(model.ok()) << model.error().to_string();
  EXPECT_EQ(text_of(model->tensor(0)), "data");
}

TEST(HfModel, TensorParallelCutsComeFromTheOptions) {
  const TempDir dir;
  dir.write("model.safetensors", one_tensor("w", "12345678"));
  const auto model = HfModel::open(dir.path(), 4);
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->layout()->tensors()[0].spec.col_cuts, (std::vector<std::uint64_t>{2, 4, 6}));
}

TEST(HfModel, ErrorsNameFileAndTensor) {
  {
    const TempDir dir;
    expect_refused(dir, Errc::not_found, "no safetensors file");
  }
  {
    const auto missing = HfModel::open("/nonexistent/deltasync");
    ASSERT_FALSE(missing.ok());
    EXPECT_EQ(missing.error().code(), Errc::not_found);
    EXPECT_THAT(missing.error().message(), HasSubstr("/nonexistent/deltasync"));
  }
  {
    const TempDir dir;
    dir.write("model.safetensors", "");
    expect_refused(dir, Errc::corrupt, "model.safetensors: shorter than");
  }
  {
    const TempDir dir;
    auto file = one_tensor("w", "1234");
    file.pop_back();
    dir.write("model.safetensors", file);
    expect_refused(dir, Errc::corrupt, "model.safetensors: tensor 'w'");
    file.resize(file.size() + 2);
    dir.write("model.safetensors", file);
    expect_refused(dir, Errc::corrupt, "the data section has 5 bytes, the tensors 4");
  }
  {
    const TempDir dir;
    dir.write("a.safetensors", one_tensor("w", "1"));
    dir.write("b.safetensors", one_tensor("w", "2"));
    expect_refused(dir, Errc::invalid_argument, "tensor 'w': listed twice");
  }
  {
    const TempDir dir;
    std::filesystem::create_directories(dir.path() / "model.safetensors");
    expect_refused(dir, Errc::invalid_argument, "not a regular file");
  }
  {
    const TempDir dir;  // a FIFO must not make anyone wait
    ASSERT_EQ(::mkfifo((dir.path() / "model.safetensors").c_str(), 0600), 0);
    expect_refused(dir, Errc::invalid_argument, "not a regular file");
  }
}

TEST(HfModel, RefusesIndexesThatLie) {
  const auto with_index = [](const std::string& index, const std::string& text, Errc code) {
    const TempDir dir;
    dir.write("a.safetensors", one_tensor("w", "1"));
    dir.write("model.safetensors.index.json", index);
    expect_refused(dir, code, text);
  };
  with_index("{", "has no weight_map", Errc::corrupt);
  with_index("[]", "has no weight_map", Errc::corrupt);
  with_index(R"({"weight_map":[]})", "has no weight_map", Errc::corrupt);
  with_index(R"({"weight_map":{}})", "weight_map is empty", Errc::corrupt);
  with_index(R"({"weight_map":{"w":1}})", "tensor 'w' has no file name", Errc::corrupt);
  with_index(R"({"weight_map":{"w":"../a.safetensors"}})", "../a.safetensors", Errc::corrupt);
  with_index(R"({"weight_map":{"w":"/etc/passwd"}})", "absolute", Errc::corrupt);
  with_index(R"({"weight_map":{"w":"b.safetensors"}})", "b.safetensors", Errc::not_found);
  with_index(R"({"weight_map":{"v":"a.safetensors"}})", "a.safetensors holds tensor 'v', but it does not",
             Errc::corrupt);
}

/// Writes the directory that a sidecar describes, tensors taken from `tensor_bytes(index)`.
template <class TensorBytes>
void write_directory(const TempDir& dir, const Sidecar& sidecar, TensorBytes&& tensor_bytes) {
  for (const auto& file : sidecar.weights) {
    auto bytes = file.bytes;
    for (const auto index : file.tensors) {
      const ByteSpan t = tensor_bytes(index);
      bytes.insert(bytes.end(), t.begin(), t.end());
    }
    dir.write(file.name, bytes);
  }
  for (const auto& file : sidecar.others) dir.write(file.name, file.bytes);
}

/// A layout with random contents.
struct RandomModel {
  LayoutPtr layout;
  std::vector<std::vector<std::byte>> tensors;
};
RandomModel make_random(std::uint64_t seed) {
  RandomModel m;
  auto specs = RandomSpecs(seed).list(12);
  std::erase_if(specs, [](const TensorSpec& s) {
    std::uint64_t elements = 1;
    for (const auto dim : s.shape) elements *= dim;
    return elements > 100'000;
  });
  auto layout = Layout::build(std::move(specs));
  EXPECT_TRUE(layout.ok());
  m.layout = std::move(layout).value();
  std::mt19937_64 random(seed);
  for (const auto& t : m.layout->tensors()) {
    std::vector<std::byte> bytes(t.bytes);
    for (auto& b : bytes) b = static_cast<std::byte>(random());
    if (t.spec.dtype == Dtype::boolean) {
      for (auto& b : bytes) b &= std::byte{1};
    }
    m.tensors.push_back(std::move(bytes));
  }
  return m;
}

TEST(HfModel, ADirectoryIsWrittenAgainBitForBit) {
  for (std::uint64_t seed = 1; seed < 12; ++seed) {
    const auto m = make_random(seed);
    const TempDir first;
    Sidecar made = make_sidecar(*m.layout);
    made.others.push_back({"config.json", {std::byte{1}}});
    write_directory(first, made, [&](std::uint32_t i) { return ByteSpan(m.tensors[i]); });

    const auto model = HfModel::open(first.path());
    ASSERT_TRUE(model.ok()) << model.error().to_string();
    const auto sidecar = Sidecar::decode(model->sidecar().encode(), *model->layout());
    ASSERT_TRUE(sidecar.ok()) << sidecar.error().to_string();
    const TempDir second;
    write_directory(second, *sidecar, [&](std::uint32_t i) { return model->tensor(i); });
    for (const char* name : {"model.safetensors", "config.json"}) {
      const auto a = read_file(first.path() / name, 1u << 30);
      const auto b = read_file(second.path() / name, 1u << 30);
      ASSERT_TRUE(a.ok() && b.ok());
      EXPECT_EQ(*a, *b) << name;
    }
    // And every tensor lies where hf_places says.
    const auto places = hf_places(*model->layout(), *sidecar);
    ASSERT_TRUE(places.ok());
    const auto file = read_file(first.path() / "model.safetensors", 1u << 30);
    for (std::uint32_t i = 0; i < model->layout()->tensors().size(); ++i) {
      const auto bytes = model->tensor(i);
      ASSERT_TRUE(
          std::equal(bytes.begin(), bytes.end(), file->begin() + static_cast<std::ptrdiff_t>((*places)[i].offset)));
      const auto original = m.layout->find(model->layout()->tensors()[i].spec.name);
      ASSERT_TRUE(original.has_value());
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), m.tensors[*original].begin(), m.tensors[*original].end()));
    }
  }
}

TEST(HfModel, PythonSafetensorsReadsWhatMakeSidecarWrites) {
  if (std::system("python3 -c 'import safetensors, numpy' >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "python3 has no safetensors and numpy packages";
  }
  std::vector<TensorSpec> specs(4);
  specs[0] = {"layers.0.\"quoted\"", Dtype::u8, {3}, {}, {}};
  specs[1] = {"f32", Dtype::f32, {2, 2}, {}, {}};
  specs[2] = {"empty", Dtype::i64, {0, 2}, {}, {}};
  specs[3] = {"scalar", Dtype::f64, {}, {}, {}};
  const auto layout = Layout::build(specs);
  ASSERT_TRUE(layout.ok());
  const float f32[] = {1.5f, -2.0f, 0.25f, 1e9f};
  const double scalar = 0.1;
  const TempDir dir;
  write_directory(dir, make_sidecar(**layout), [&](std::uint32_t i) -> ByteSpan {
    if (i == 0) return bytes_of(std::string_view("\x01\x02\xff"));
    if (i == 1) return bytes_of(f32);
    if (i == 3) return bytes_of(scalar);
    return {};
  });
  dir.write("check.py", R"(
import sys, numpy
from safetensors import safe_open
from safetensors.numpy import load_file
tensors = load_file(sys.argv[1])
assert sorted(tensors) == ['empty', 'f32', 'layers.0."quoted"', 'scalar'], sorted(tensors)
assert tensors['f32'].tolist() == [[1.5, -2.0], [0.25, 1e9]]
assert tensors['layers.0."quoted"'].tolist() == [1, 2, 255]
assert tensors['empty'].shape == (0, 2) and tensors['scalar'].shape == () and tensors['scalar'] == 0.1
with safe_open(sys.argv[1], 'numpy') as f:
    assert f.metadata() == {'format': 'pt'}
)");
  const auto command =
      "python3 " + (dir.path() / "check.py").string() + " " + (dir.path() / "model.safetensors").string();
  EXPECT_EQ(std::system(command.c_str()), 0);
}

}  // namespace
}  // namespace deltasync
