// Safetensors headers: what is read, what is refused and with which words.
#include "format/safetensors.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

namespace deltasync::safetensors {
namespace {

using testing::HasSubstr;

std::vector<std::byte> header_of(std::string_view json) {
  std::vector<std::byte> header;
  ByteWriter out(header);
  out.put<std::uint64_t>(json.size());
  out.append(bytes_of(json));
  return header;
}

void expect_refused(std::string_view json, std::uint64_t data_bytes, Errc code, const std::string& text) {
  const auto entries = parse_header(header_of(json), data_bytes);
  ASSERT_FALSE(entries.ok()) << "accepted: " << json;
  EXPECT_EQ(entries.error().code(), code) << json;
  EXPECT_THAT(entries.error().message(), HasSubstr(text)) << json;
}

/// A header with one U8 tensor "w" of 4 bytes whose fields are replaced by the given ones.
void expect_tensor_refused(const std::string& fields, const std::string& text, Errc code = Errc::corrupt) {
  expect_refused("{\"w\":{" + fields + "}}", 4, code, text);
}

TEST(Safetensors, ReadsInFileOrder) {
  const auto entries = parse_header(
      header_of(R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},"__metadata__":{"format":"pt","x":""},)"
                R"("a":{"shape":[3,1],"data_offsets":[0,6],"dtype":"BF16"},"none":{"dtype":"I8","shape":[0,7],)"
                R"("data_offsets":[6,6]},"s":{"dtype":"F64","shape":[],"data_offsets":[14,22]}}   )"),
      22);
  ASSERT_TRUE(entries.ok()) << entries.error().to_string();
  ASSERT_EQ(entries->size(), 4u);
  EXPECT_EQ((*entries)[0].name, "a");
  EXPECT_EQ((*entries)[0].dtype, Dtype::bf16);
  EXPECT_EQ((*entries)[0].shape, (std::vector<std::uint64_t>{3, 1}));
  EXPECT_EQ((*entries)[1].name, "none");
  EXPECT_EQ((*entries)[2].name, "b");
  EXPECT_EQ((*entries)[2].begin, 6u);
  EXPECT_EQ((*entries)[3].name, "s");
  EXPECT_TRUE((*entries)[3].shape.empty());
  EXPECT_TRUE(parse_header(header_of("{}"), 0).ok());
}

TEST(Safetensors, KnowsAHeaderThatItWouldWrite) {
  const auto layout = Layout::build({{"plain.weight", Dtype::bf16, {3, 4}, {}, {}},
                                     {"none", Dtype::f32, {0, 4}, {}, {}},
                                     {"quoted \"\\ \u00e9", Dtype::f4, {2, 8}, {}, {}},
                                     {"scalar", Dtype::u8, {}, {}, {}}});
  ASSERT_TRUE(layout.ok());
  const std::vector<std::uint32_t> order = {3, 1, 2, 0};
  HeaderBuilder builder;
  std::uint64_t data_bytes = 0;
  for (const std::uint32_t index : order) {
    ASSERT_TRUE(builder.add((*layout)->tensors()[index]));
    data_bytes += (*layout)->tensors()[index].bytes;
  }
  const std::vector<std::byte> header = builder.finish();
  ASSERT_TRUE(parse_header(header, data_bytes).ok());
  EXPECT_TRUE(is_built_header(header, **layout, order));
  EXPECT_FALSE(is_built_header(header, **layout, std::vector<std::uint32_t>{3, 1, 2}));
  EXPECT_FALSE(is_built_header(header, **layout, std::vector<std::uint32_t>{3, 1, 0, 2}));
  for (std::size_t n = 0; n < header.size(); ++n) {
    EXPECT_FALSE(is_built_header(ByteSpan(header).first(n), **layout, order)) << n;
    std::vector<std::byte> wrong = header;
    wrong[n] ^= std::byte{1};
    EXPECT_FALSE(is_built_header(wrong, **layout, order)) << n;
  }
  EXPECT_FALSE(is_built_header(header_of("{}"), **layout, {})) << "it may still be one";
}

TEST(Safetensors, EveryDtypeOfTheFormat) {
  for (const char* dtype : {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL",
                            "U16", "U32", "U64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}) {
    const auto bytes = dtype_bytes(*dtype_from_string(dtype));
    const auto json = std::string(R"({"w":{"dtype":")") + dtype + R"(","shape":[1],"data_offsets":[0,)" +
                      std::to_string(bytes) + "]}}";
    EXPECT_TRUE(parse_header(header_of(json), bytes).ok()) << dtype;
  }
  EXPECT_TRUE(parse_header(header_of(R"({"w":{"dtype":"F4","shape":[3,4],"data_offsets":[0,6]}})"), 6).ok());
  expect_tensor_refused(R"("dtype":"F4","shape":[8,1],"data_offsets":[0,4])", "its last dimension is no multiple of 2");
  expect_tensor_refused(R"("dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3])",
                        "tensor 'w': dtype 'F6_E2M3' is not known", Errc::unsupported);
}

TEST(Safetensors, LengthFieldIsNotTrusted) {
  const auto header = header_of("{}");
  for (std::size_t n = 0; n < kLengthBytes; ++n) {
    EXPECT_FALSE(header_bytes(std::span(header).first(n), n).ok());
  }
  EXPECT_EQ(header_bytes(header, header.size()).value(), 10u);
  for (const std::uint64_t lie : {std::uint64_t{3}, std::uint64_t{100'000'001}, ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    auto lying = header;
    store(lying.data(), lie);
    const auto bytes = header_bytes(lying, lying.size());
    ASSERT_FALSE(bytes.ok()) << lie;
    EXPECT_EQ(bytes.error().code(), Errc::corrupt);
    EXPECT_THAT(bytes.error().message(), HasSubstr(std::to_string(lie)));
    EXPECT_FALSE(parse_header(lying, 0).ok());
  }
  // Too long a header is refused even if the file has the bytes.
  auto large = header;
  store(large.data(), kJsonBytesMax + 1);
  EXPECT_FALSE(header_bytes(large, kJsonBytesMax * 2).ok());
  auto shorter = header_of("{}  ");
  store(shorter.data(), std::uint64_t{2});
  EXPECT_FALSE(parse_header(shorter, 0).ok());
}

TEST(Safetensors, RefusesOverlapsHolesAndRanges) {
  const auto two = [](const char* a, const char* b) {
    return std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
  };
  EXPECT_TRUE(parse_header(header_of(two("[0,4]", "[4,8]")), 8).ok());
  expect_refused(two("[0,4]", "[3,7]"), 7, Errc::corrupt, "tensor 'b': its bytes [3, 7) overlap");
  expect_refused(two("[0,4]", "[0,4]"), 4, Errc::corrupt, "overlap");
  expect_refused(two("[0,4]", "[5,9]"), 9, Errc::corrupt, "tensor 'b': its bytes [5, 9) leave a hole");
  expect_refused(two("[1,5]", "[5,9]"), 9, Errc::corrupt, "tensor 'a': its bytes [1, 5) leave a hole");
  expect_refused(two("[0,4]", "[4,8]"), 9, Errc::corrupt, "the data section has 9 bytes, the tensors 8");
  expect_refused(two("[0,4]", "[4,8]"), 7, Errc::corrupt, "tensor 'b': its bytes [4, 8) are not in the data section");
  expect_refused(two("[0,4]", "[4,3]"), 8, Errc::corrupt, "tensor 'b'");
  expect_refused(two("[0,4]", "[4,18446744073709551615]"), 8, Errc::corrupt, "tensor 'b'");
  expect_refused("{}", 1, Errc::corrupt, "the data section has 1 bytes");
}

TEST(Safetensors, RefusesSizesThatDisagree) {
  expect_tensor_refused(R"("dtype":"U8","shape":[5],"data_offsets":[0,4])", "need 5");
  expect_tensor_refused(R"("dtype":"BF16","shape":[4],"data_offsets":[0,4])", "need 8");
  expect_tensor_refused(R"("dtype":"U8","shape":[0,4],"data_offsets":[0,4])", "need 0");
  expect_tensor_refused(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4])", "too large");
  expect_tensor_refused(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4])", "too large");
}

TEST(Safetensors, RefusesWhatIsNoHeader) {
  expect_refused("", 0, Errc::corrupt, "'{'");
  expect_refused(" {}", 0, Errc::corrupt, "'{'");
  expect_refused("[]", 0, Errc::corrupt, "'{'");
  expect_refused("{", 0, Errc::corrupt, "not JSON");
  expect_refused("{}{}", 0, Errc::corrupt, "not JSON");
  expect_refused("{\"w\xff\":{}}", 0, Errc::corrupt, "not JSON");
  expect_refused(R"({"w":5})", 0, Errc::corrupt, "in tensor 'w'");
  expect_refused(R"({"w":null})", 0, Errc::corrupt, "unexpected null in tensor 'w'");
  expect_refused(R"({"":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4, Errc::corrupt, "without a name");
  expect_tensor_refused("", "needs dtype");
  expect_tensor_refused(R"("dtype":"U8","shape":[4])", "needs dtype, shape and two data_offsets");
  expect_tensor_refused(R"("dtype":"U8","shape":[4],"data_offsets":[0])", "two data_offsets");
  expect_tensor_refused(R"("dtype":"U8","shape":[4],"data_offsets":[0,4,8])", "data_offsets has too many");
  expect_tensor_refused(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4],"data_offsets":[0,4])",
                        "shape has too many");
  expect_tensor_refused(R"("dtype":8,"shape":[4],"data_offsets":[0,4])", "unexpected number");
  expect_tensor_refused(R"("dtype":"U8","shape":[-4],"data_offsets":[0,4])", "negative");
  expect_tensor_refused(R"("dtype":"U8","shape":[4.0],"data_offsets":[0,4])", "no unsigned integer");
  expect_tensor_refused(R"("dtype":"U8","shape":[[4]],"data_offsets":[0,4])", "unexpected array");
  expect_tensor_refused(R"("dtype":"U8","shape":[true],"data_offsets":[0,4])", "boolean");
  expect_tensor_refused(R"("dtype":"U8","shape":4,"data_offsets":[0,4])", "unexpected number");
  expect_tensor_refused(R"("dtype":"U8","shape":{},"data_offsets":[0,4])", "unexpected object");
  expect_tensor_refused(R"("dtype":"U8","shape":[4],"data_offsets":[0,4],"stride":[1])", "unknown key 'stride'");
  expect_refused(R"({"__metadata__":{"a":1}})", 0, Errc::corrupt, "in __metadata__");
  expect_refused(R"({"__metadata__":"a"})", 0, Errc::corrupt, "in __metadata__");
  const std::string deep(1'000'000, '[');
  expect_refused("{\"w\":" + deep, 0, Errc::corrupt, "unexpected array");
}

TEST(Safetensors, RefusesEveryKeyThatOccursTwice) {
  const std::string w = R"("w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_refused("{" + w + "," + w + "}", 0, Errc::corrupt, "tensor 'w' is listed twice");
  expect_refused(R"({"__metadata__":{},"__metadata__":{}})", 0, Errc::corrupt, "__metadata__ is listed twice");
  expect_refused(R"({"__metadata__":{"a":"1","a":"2"}})", 0, Errc::corrupt, "the key 'a' twice");
  expect_tensor_refused(R"("dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4])", "the key 'dtype' twice");
  expect_tensor_refused(R"("dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4])", "the key 'shape' twice");
  expect_tensor_refused(R"("dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4])",
                        "'data_offsets' twice");
}

TEST(Safetensors, EveryTruncationAndBitFlipOfAHeaderIsHandled) {
  const auto header =
      header_of(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},)"
                R"("b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})");
  ASSERT_TRUE(parse_header(header, 20).ok());
  for (std::size_t n = 0; n < header.size(); ++n) EXPECT_FALSE(parse_header(std::span(header).first(n), 20).ok());
  for (std::size_t bit = 0; bit < header.size() * 8; ++bit) {
    auto flipped = header;
    flipped[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto entries = parse_header(flipped, 20);
    if (!entries.ok()) continue;
    // What is left are other names, other metadata, another dtype of the same width: never other sizes.
    ASSERT_EQ(entries->size(), 2u);
    EXPECT_EQ((*entries)[0].end, 12u);
    EXPECT_EQ((*entries)[1].end, 20u);
  }
}

TEST(Safetensors, WritesWhatItReads) {
  std::vector<TensorSpec> specs(4);
  specs[0].name = "plain";
  specs[0].shape = {3, 5};
  specs[1].name = "quote\" slash\\ umlaut\xc3\xa4";
  specs[1].dtype = Dtype::f8_e4m3;
  specs[1].shape = {7};
  specs[2].name = "empty";
  specs[2].shape = {0, 3};
  specs[3].name = "scalar";
  specs[3].dtype = Dtype::i64;
  const auto layout = Layout::build(specs);
  ASSERT_TRUE(layout.ok());
  HeaderBuilder builder;
  for (const auto& t : (*layout)->tensors()) ASSERT_TRUE(builder.add(t));
  const auto header = builder.finish();
  EXPECT_EQ(header.size() % 8, 0u);
  const auto entries = parse_header(header, (*layout)->model_bytes());
  ASSERT_TRUE(entries.ok()) << entries.error().to_string();
  ASSERT_EQ(entries->size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ((*entries)[i].name, specs[i].name);
    EXPECT_EQ((*entries)[i].dtype, specs[i].dtype);
    EXPECT_EQ((*entries)[i].shape, specs[i].shape);
  }
}

}  // namespace
}  // namespace deltasync::safetensors
