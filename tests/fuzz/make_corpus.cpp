// Writes the hand-made part of the corpus: for each target, valid inputs and one malformed input per rule.
//   make_corpus DIR    → DIR/layout/…, DIR/wire/…, …
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>

#include "agent/versions/kept_delta.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/layout.hpp"
#include "format/packed_layout.hpp"
#include "format/safetensors.hpp"
#include "format/tiling.hpp"
#include "format/wire.hpp"
#include "format/wire_report.hpp"
#include "fuzz_delta_layout.hpp"
#include "receiver/targets/directory/hf_record.hpp"
#include "shm/segment.hpp"

namespace {

using namespace deltasync;
using Bytes = std::vector<std::byte>;

class Corpus {
 public:
  explicit Corpus(std::filesystem::path dir) : dir_(std::move(dir)) {}

  void add(const std::string& target, const std::string& name, ByteSpan bytes) const {
    std::filesystem::create_directories(dir_ / target);
    std::ofstream out(dir_ / target / name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  void add(const std::string& target, const std::string& name, std::string_view text) const {
    add(target, name, bytes_of(text));
  }
  /// A copy with one change.
  void spoil(const std::string& target, const std::string& name, Bytes bytes,
             const std::function<void(Bytes&)>& change) const {
    change(bytes);
    add(target, name, bytes);
  }

 private:
  std::filesystem::path dir_;
};

template <class T>
void poke(Bytes& bytes, std::size_t at, T value) {
  store(bytes.data() + at, value);
}

void layouts(const Corpus& corpus) {
  const Bytes good = fuzz::layout().encode();
  corpus.add("layout", "good", good);
  corpus.add("layout", "later-dtypes",
             Layout::build({{"e8m0", Dtype::f8_e8m0, {3, 4}, {}, {}},
                            {"e4m3fnuz", Dtype::f8_e4m3fnuz, {3}, {}, {}},
                            {"e5m2fnuz", Dtype::f8_e5m2fnuz, {3}, {}, {1}},
                            {"c64", Dtype::c64, {}, {}, {}},
                            {"f4", Dtype::f4, {2, 8}, {1}, {2}}})
                 .value()
                 ->encode());
  corpus.add("layout", "none", Layout::build({}).value()->encode());
  corpus.spoil("layout", "bad-magic", good, [](Bytes& b) { b[0] ^= std::byte{1}; });
  corpus.spoil("layout", "bad-version", good, [](Bytes& b) { poke<std::uint32_t>(b, 8, 2); });
  corpus.spoil("layout", "count-lies", good, [](Bytes& b) { poke<std::uint64_t>(b, 12, ~std::uint64_t{0}); });
  corpus.spoil("layout", "name-length-lies", good, [](Bytes& b) { poke<std::uint32_t>(b, 20, ~std::uint32_t{0}); });
  corpus.spoil("layout", "trailing-byte", good, [](Bytes& b) { b.push_back(std::byte{0}); });
  // The first tensor: u32 4, "bf16", dtype, dims.
  corpus.spoil("layout", "dtype-unknown", good, [](Bytes& b) { b[28] = std::byte{99}; });
  corpus.spoil("layout", "too-many-dims", good, [](Bytes& b) { b[29] = std::byte{17}; });
  corpus.spoil("layout", "dims-overflow", good, [](Bytes& b) { poke<std::uint64_t>(b, 30, std::uint64_t{1} << 63); });
  corpus.spoil("layout", "cut-out-of-range", good, [](Bytes& b) { poke<std::uint64_t>(b, 50, 64); });
}

template <class Message>
void message(const Corpus& corpus, const std::string& name, const Message& m) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put(static_cast<std::uint16_t>(Message::kType));
  out.append(m.encode());
  corpus.add("wire", name, bytes);
}

void messages(const Corpus& corpus) {
  message(corpus, "hello", wire::Hello{});
  wire::Auth auth;
  auth.name = "receiver";
  message(corpus, "auth", auth);
  message(corpus, "welcome", wire::Welcome{});
  wire::ErrorMessage error;
  error.message = "gone";
  message(corpus, "error", error);
  wire::LayoutMessage layout;
  layout.layout_raw_bytes = 3;
  layout.layout_zstd.resize(9);
  message(corpus, "layout", layout);
  wire::PlanRequest plan;
  plan.base = {5, 6};
  plan.label = "step";
  plan.compact = 1;
  message(corpus, "plan", plan);
  plan.arriving = 1;
  message(corpus, "plan-arriving", plan);
  wire::PlanReply reply;
  reply.mode = wire::PlanMode::delta;
  reply.plan = 77;
  reply.target = {{5, 8}, "step_8"};
  reply.steps = {{{5, 6}, {5, 7}, {}, 3, 100, 20}, {{5, 7}, {5, 8}, {}, 1, 80, 2}};
  message(corpus, "plan-reply", reply);
  reply.mode = wire::PlanMode::full;
  reply.arriving = 1;
  message(corpus, "plan-reply-arriving", reply);
  wire::GetFrames frames;
  frames.plan = 77;
  frames.step = 1;
  frames.ranges = {{0, 4}, {9, 10}, {300, 90'000}};
  message(corpus, "get-frames", frames);
  wire::GetExtent extent;
  extent.plan = 77;
  extent.tiles = {2, 9};
  message(corpus, "get-extent", extent);
  wire::Subscribe subscribe;
  subscribe.ranges = {{0, 4}, {9, 10}, {300, 90'000}};
  message(corpus, "subscribe", subscribe);
  message(corpus, "get-digests", wire::GetDigests{});
  message(corpus, "get-raw-tiles", wire::GetRawTiles{});
  message(corpus, "release", wire::Release{});
  message(corpus, "version-ready", wire::VersionReady{});
  message(corpus, "report", wire::Report{7, {{3, 4}, "step_4"}, "commit: no space"});
  message(corpus, "get-lag", wire::GetLag{{3, 4}});
  message(corpus, "lag", wire::Lag{{{3, 5}, "step_5"}, 1, 2, 3});
  wire::TrainerHello hello;
  hello.name = "trainer";
  message(corpus, "trainer-hello", hello);
  message(corpus, "trainer-welcome", wire::TrainerWelcome{});
  wire::TrainerPlan trainer_plan;
  trainer_plan.rects = {{0, 0, 0, 4, 8}, {1, 0, 1, 1, 2}};
  message(corpus, "trainer-plan", trainer_plan);
  message(corpus, "trainer-notify", wire::TrainerNotify{2, 1});
  message(corpus, "trainer-arrival", wire::TrainerArrival{{}, {{3, 4}, "step_4"}, {}, {5, 6, 7}});
  message(corpus, "trainer-delta", wire::TrainerDelta{{}, {{3, 4}, "step_4"}, {{3, 5}, "step_5"}, {}, {}, 6, 7, 8});
  message(corpus, "trainer-frames", wire::TrainerFrames{{5, 7}, std::vector<std::byte>(9)});
  message(corpus, "trainer-wait", wire::TrainerWait{});
  message(corpus, "trainer-ready", wire::TrainerReady{});
  // As they come from a connection, behind a type that is none.
  const auto whole = [&](const std::string& name, const wire::Header& header, ByteSpan payload) {
    Bytes bytes(2);
    ByteWriter out(bytes);
    out.append(bytes_of(header));
    out.append(payload);
    corpus.add("wire", "whole-" + name, bytes);
  };
  const Bytes payload = wire::VersionReady{}.encode();
  const wire::Header header = wire::make_header(wire::Type::version_ready, 9, payload);
  whole("version-ready", header, payload);
  whole("cut", header, ByteSpan(payload).first(payload.size() - 1));
  whole("other-payload", header, Bytes(payload.size(), std::byte{'x'}));
  whole("extent", wire::make_header(wire::Type::extent, 9, {}, payload.size()), payload);
  whole("end", wire::make_header(wire::Type::end, 9, {}), {});
  whole("too-long", wire::make_header(wire::Type::extent, 9, {}, wire::kExtentBytesMax + 1), payload);
}

/// A delta of a fixed layout in which `changes` of 1,000 words change by one bit.
delta::Delta make_delta(const Layout& layout, unsigned changes, delta::ValueForm form, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes before(layout.half_bytes());
  Bytes after = before;
  for (const auto& tensor : layout.tensors()) {
    for (std::uint64_t i = 0; i < tensor.bytes; i += tensor.element_bytes) {
      if (random() % 1000 < changes) after[tensor.offset + i] ^= static_cast<std::byte>(1 + random() % 255);
    }
  }
  ThreadPool pool(1, "corpus");
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, before, digests, pool);
  return delta::encode(layout, before, after, digests, {{1, 1}, {1, 2}, delta::root_digest(digests), form}, pool);
}

void deltas(const Corpus& corpus) {
  const struct {
    const char* name;
    unsigned changes;
    delta::ValueForm form;
  } kinds[] = {{"empty", 0, delta::ValueForm::ulp},
               {"sparse", 10, delta::ValueForm::ulp},
               {"absolute", 30, delta::ValueForm::absolute},
               {"dense", 900, delta::ValueForm::ulp}};
  for (const auto& kind : kinds) {
    const auto delta = make_delta(fuzz::layout(), kind.changes, kind.form, kind.changes + 1);
    const Bytes container = to_container(delta);
    corpus.add("container", kind.name, container);
    for (std::size_t i = 0; i < delta.frames.size(); ++i) {
      corpus.add("frame", std::string(kind.name) + "-" + std::to_string(i), delta.frames[i].bytes);
    }
  }
  for (const auto& kind : kinds) {
    const auto delta = make_delta(fuzz::aligned_layout(), kind.changes, kind.form, kind.changes + 2);
    for (std::size_t i = 0; i < delta.frames.size(); ++i) {
      corpus.add("frame", "aligned-" + std::string(kind.name) + "-" + std::to_string(i), delta.frames[i].bytes);
    }
  }
  const Bytes dense = make_delta(fuzz::aligned_layout(), 900, delta::ValueForm::ulp, 902).frames.at(0).bytes;
  const std::size_t bits = 64 + load<delta::FrameHeader>(dense.data()).table_bytes + 20'000;
  corpus.spoil("frame", "dense-bits-of-ones", dense, [&](Bytes& b) { std::memset(&b[bits], 0xFF, 400); });
  corpus.spoil("frame", "dense-bits-of-zeros", dense, [&](Bytes& b) { std::memset(&b[bits], 0, 400); });
  const Bytes good = make_delta(fuzz::layout(), 30, delta::ValueForm::ulp, 9).frames.at(0).bytes;
  corpus.spoil("frame", "table-bytes-lie", good, [](Bytes& b) { poke<std::uint32_t>(b, 20, ~std::uint32_t{0}); });
  corpus.spoil("frame", "tiles-lie", good, [](Bytes& b) { poke<std::uint32_t>(b, 16, ~std::uint32_t{0}); });
  corpus.spoil("frame", "first-tile-outside", good,
               [](Bytes& b) { poke<std::uint64_t>(b, 8, std::uint64_t{1} << 60); });
  corpus.spoil("frame", "half-a-body", good, [](Bytes& b) { b.resize(64 + (b.size() - 64) / 2); });
  corpus.spoil("frame", "body-of-ones", good, [](Bytes& b) { std::memset(b.data() + 64, 0xFF, b.size() - 64); });
  corpus.spoil("frame", "body-of-zeros", good, [](Bytes& b) { std::memset(b.data() + 64, 0, b.size() - 64); });
}

/// A delta in exponent classes over the patterned half, in which `changes` of 1,000 elements of the smallest
/// exponents, and an eighth of that of the others, move by some ulp. Without
/// `bytes`, the large tensor of bytes stays out of it, since the regression runs all neighbours of an input.
delta::Delta make_class_delta(unsigned changes, unsigned ulps_max, bool bytes, std::uint64_t seed) {
  const Layout& layout = fuzz::layout();
  std::mt19937_64 random(seed);
  const ByteSpan before = fuzz::patterned_half(layout);
  Bytes after(before.begin(), before.end());
  for (const auto& tensor : layout.tensors()) {
    for (std::uint64_t i = 0; i < tensor.bytes; i += tensor.element_bytes) {
      const bool small = after[tensor.offset + i + tensor.element_bytes - 1] == std::byte{0x3C};
      if ((tensor.element_bytes == 1 && !bytes) || random() % 8000 >= changes * (small ? 8 : 1)) continue;
      std::uint64_t element = 0;
      std::memcpy(&element, &after[tensor.offset + i], tensor.element_bytes);
      const std::uint64_t ulps = 1 + (random() % 8 == 0 ? random() % ulps_max : 0);
      element = random() % 2 == 0 ? element + ulps : element - ulps;
      std::memcpy(&after[tensor.offset + i], &element, tensor.element_bytes);
    }
  }
  ThreadPool pool(1, "corpus");
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, before, digests, pool);
  const delta::EncodeRequest request{{1, 1}, {1, 2}, delta::root_digest(digests), delta::ValueForm::ulp};
  return delta::compact(layout, delta::encode(layout, before, after, digests, request, pool), before, pool).value();
}

void class_deltas(const Corpus& corpus) {
  const struct {
    const char* name;
    unsigned changes;
    unsigned ulps_max;
    bool bytes;
  } kinds[] = {{"class-bytes", 3, 3, true},
               {"class-sparse", 100, 3, false},
               {"class-dense", 400, 100, false},
               {"class-full", 1000, 2, false}};
  for (const auto& kind : kinds) {
    const auto delta = make_class_delta(kind.changes, kind.ulps_max, kind.bytes, kind.changes + 1);
    corpus.add("container", kind.name, to_container(delta));
    for (std::size_t i = 0; i < delta.frames.size(); ++i) {
      corpus.add("frame", std::string(kind.name) + "-" + std::to_string(i), delta.frames[i].bytes);
    }
  }
  const Bytes good = make_class_delta(300, 9, false, 5).frames.at(0).bytes;
  const std::size_t payload = 64 + load<delta::FrameHeader>(good.data()).table_bytes;
  const auto spoil = [&](const std::string& name, const std::function<void(Bytes&)>& change) {
    corpus.spoil("frame", "class-" + name, good, change);
  };
  spoil("no-classes", [&](Bytes& b) { b[payload] &= std::byte{0xF0}; });
  spoil("too-many-classes", [&](Bytes& b) { b[payload] |= std::byte{0x0F}; });
  spoil("reserved-bits", [&](Bytes& b) { b[payload] |= std::byte{0xC0}; });
  spoil("top-outside", [&](Bytes& b) { b[payload + 1] = std::byte{0xFF}; });
  spoil("top-zero", [&](Bytes& b) { b[payload + 1] = std::byte{0}; });
  spoil("parameters-large", [&](Bytes& b) { b[payload + 2] = std::byte{0xFF}; });
  spoil("counts-lie", [&](Bytes& b) { std::memset(&b[payload + 3], 0x7F, 4); });
  spoil("bits-of-ones", [&](Bytes& b) { std::memset(&b[payload + 12], 0xFF, 60); });
  spoil("bits-of-zeros", [&](Bytes& b) { std::memset(&b[payload + 12], 0, 60); });
  spoil("bits-behind-the-end", [&](Bytes& b) { b.back() |= std::byte{0x80}; });
}

/// Whole tiles in byte planes: those of a half that packs, and payloads that break one rule each.
void packed_tiles(const Corpus& corpus) {
  const Layout& layout = fuzz::layout();
  const ByteSpan half = fuzz::patterned_half(layout);
  ThreadPool pool(1, "corpus");
  std::vector<std::uint64_t> digests(layout.tile_count());
  delta::half_digests(layout, half, digests, pool);
  // Without the large tensor of bytes: the regression runs all neighbours of an input.
  std::vector<std::uint64_t> tiles;
  for (std::uint64_t t = 0; t < layout.tile_count(); ++t) {
    if (layout.tensors()[tile_of(layout, t).tensor].element_bytes > 1) tiles.push_back(t);
  }
  for (std::size_t i = 0; i < tiles.size(); i += 3) {
    const auto some = std::span(tiles).subspan(i, std::min<std::size_t>(3, tiles.size() - i));
    corpus.add("frame", "planes-" + std::to_string(i), delta::packed_frame(layout, half, some, digests).bytes);
  }
  const std::uint64_t first[] = {0};
  const Bytes good = delta::packed_frame(layout, half, first, digests).bytes;
  const std::size_t payload = 64 + load<delta::FrameHeader>(good.data()).table_bytes;
  const auto spoil = [&](const std::string& name, const std::function<void(Bytes&)>& change) {
    corpus.spoil("frame", "planes-" + name, good, change);
  };
  spoil("all-packed", [&](Bytes& b) { b[payload] = std::byte{3}; });
  spoil("too-many", [&](Bytes& b) { b[payload] = std::byte{0xFF}; });
  spoil("size-lies", [&](Bytes& b) { b[payload + 1] ^= std::byte{1}; });
  spoil("no-frames", [&](Bytes& b) { std::memset(&b[payload + 3], 0, b.size() - payload - 3); });
  spoil("frames-of-ones", [&](Bytes& b) { std::memset(&b[b.size() - 30], 0xFF, 30); });
}

void sidecars(const Corpus& corpus) {
  const LayoutPtr layout = Layout::build({{"a", Dtype::bf16, {4, 8}, {}, {}}, {"b", Dtype::f32, {3}, {}, {}}}).value();
  Sidecar sidecar = make_sidecar(*layout);
  sidecar.others.push_back({"config.json", Bytes(20)});
  const Bytes good = sidecar.encode();
  corpus.add("sidecar", "good", good);
  corpus.add("sidecar", "empty", Sidecar{}.encode());
  sidecar.others[0].name = "../../etc/passwd";
  corpus.add("sidecar", "escapes", sidecar.encode());
  sidecar.others[0].name = sidecar.weights[0].name;
  corpus.add("sidecar", "same-name-twice", sidecar.encode());
  sidecar.others[0].name = "config.json";
  sidecar.weights[0].tensors = {0, 0};
  corpus.add("sidecar", "tensor-twice", sidecar.encode());
  sidecar.weights[0].tensors = {0, 7};
  corpus.add("sidecar", "tensor-unknown", sidecar.encode());
}

void headers(const Corpus& corpus) {
  const auto add = [&](const std::string& name, std::uint64_t data_bytes, std::string_view json,
                       std::int64_t length_error = 0) {
    Bytes bytes;
    ByteWriter out(bytes);
    out.put(data_bytes);
    out.put(static_cast<std::uint64_t>(static_cast<std::int64_t>(json.size()) + length_error));
    out.append(bytes_of(json));
    corpus.add("safetensors", name, bytes);
  };
  add("good", 16,
      R"({"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})");
  add("metadata", 8, R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})");
  add("none", 0, "{}");
  add("length-lies", 0, "{}", 1'000'000'000);
  add("overlap", 12,
      R"({"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})");
  add("hole", 20,
      R"({"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})");
  add("backwards", 8, R"({"a":{"dtype":"BF16","shape":[4],"data_offsets":[8,0]}})");
  add("twice", 8,
      R"({"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}})");
  add("shape-overflows", 8,
      R"({"a":{"dtype":"BF16","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}})");
  add("four-bits", 8, R"({"a":{"dtype":"F4","shape":[4,4],"data_offsets":[0,8]}})");
  add("four-bits-odd", 8, R"({"a":{"dtype":"F4","shape":[16,1],"data_offsets":[0,8]}})");
  add("negative", 8, R"({"a":{"dtype":"BF16","shape":[-4],"data_offsets":[0,8]}})");
  add("fraction", 8, R"({"a":{"dtype":"BF16","shape":[4.5],"data_offsets":[0,8]}})");
  add("dtype-unknown", 8, R"({"a":{"dtype":"Q4","shape":[4],"data_offsets":[0,8]}})");
  add("no-dtype", 8, R"({"a":{"shape":[4],"data_offsets":[0,8]}})");
  add("deep", 0, std::string(2000, '['));
  add("not-json", 0, "{]");
  add("array", 0, "[]");
}

void packed_layouts(const Corpus& corpus) {
  const LayoutPtr layout = Layout::build({{"a", Dtype::bf16, {4, 8}, {}, {}}}).value();
  const Sidecar sidecar = make_sidecar(*layout);
  const auto good = wire::pack_layout(layout->encode(), sidecar.encode()).value();
  corpus.add("packed_layout", "good", good.encode());
  corpus.add("packed_layout", "no-sidecar", wire::pack_layout(layout->encode(), {}).value().encode());
  const auto spoil = [&](const std::string& name, const std::function<void(wire::LayoutMessage&)>& change) {
    auto message = good;
    change(message);
    corpus.add("packed_layout", name, message.encode());
  };
  spoil("raw-bytes-too-small", [](auto& m) { --m.layout_raw_bytes; });
  spoil("raw-bytes-too-large", [](auto& m) { ++m.sidecar_raw_bytes; });
  spoil("frame-truncated", [](auto& m) { m.layout_zstd.pop_back(); });
  spoil("frame-with-a-tail", [](auto& m) { m.sidecar_zstd.push_back(std::byte{0}); });
  spoil("no-frame", [](auto& m) { m.layout_zstd.assign(9, std::byte{7}); });
  spoil("two-frames", [](auto& m) {
    const auto once = m.layout_zstd;
    m.layout_zstd.insert(m.layout_zstd.end(), once.begin(), once.end());
  });
}

void kept_deltas(const Corpus& corpus) {
  auto delta = make_delta(fuzz::layout(), 10, delta::ValueForm::ulp, 11);
  const Version from{delta.from, "step_1"};
  const Version to{delta.to, "step_2"};
  const auto entry = agent::RingEntry::make(std::move(delta), from, to, 0, {{0, 1}, {3, 4}});
  Bytes good = agent::kept_delta_head(*entry);
  for (const auto& frame : entry->delta->frames) good.insert(good.end(), frame.bytes.begin(), frame.bytes.end());
  corpus.add("kept_delta", "good", good);
  corpus.spoil("kept_delta", "bad-magic", good, [](Bytes& b) { b[0] ^= std::byte{1}; });
  corpus.spoil("kept_delta", "bad-header-hash", good, [](Bytes& b) { b[40] ^= std::byte{1}; });
  corpus.spoil("kept_delta", "bad-list-hash", good, [](Bytes& b) { b[60] ^= std::byte{1}; });
  corpus.spoil("kept_delta", "truncated", good, [](Bytes& b) { b.resize(b.size() - 5); });
  const auto sealed = [](Bytes& b) {  // so that what lies behind the hashes is reached
    const auto list_bytes = load<std::uint64_t>(b.data() + 16);
    if (list_bytes <= b.size() - 48) {
      poke(b, 24, xxh3_64(ByteSpan(b).subspan(48, static_cast<std::size_t>(list_bytes))));
    }
    poke(b, 40, xxh3_64(ByteSpan(b).first(40)));
  };
  const auto spoil = [&](const char* name, const std::function<void(Bytes&)>& change) {
    corpus.spoil("kept_delta", name, good, [&](Bytes& b) { change(b), sealed(b); });
  };
  spoil("list-bytes-lie", [](Bytes& b) { poke(b, 16, ~std::uint64_t{0}); });
  spoil("another-version", [](Bytes& b) { poke(b, 8, std::uint32_t{2}); });
  spoil("label-with-a-newline", [](Bytes& b) { b[52] = std::byte{'\n'}; });
  spoil("label-bytes-lie", [](Bytes& b) { poke(b, 48, ~std::uint32_t{0}); });
  spoil("tiles-lie", [](Bytes& b) { poke(b, 68, ~std::uint64_t{0}); });
  spoil("tile-outside", [](Bytes& b) { poke(b, 76, std::uint64_t{1} << 40); });
  spoil("tiles-out-of-order", [](Bytes& b) { poke(b, 92, std::uint64_t{0}); });
}

void segments(const Corpus& corpus) {
  const auto dir = std::filesystem::temp_directory_path();
  const shm::SegmentPath path{dir, "deltasync-fuzz-segment"};
  static_cast<void>(shm::Segment::unlink(path));
  const auto segment = shm::Segment::create(path, 1, {4096, 3, Digest128{}}, bytes_of(std::string_view("layout")),
                                            bytes_of(std::string_view("sidecar")))
                           .value();
  const auto file_bytes = segment->control().header.segment_bytes;
  Bytes good(8 + segment->control().header.sidecar_offset + segment->control().header.sidecar_bytes);
  poke(good, 0, file_bytes);
  std::memcpy(good.data() + 8, &segment->control(), good.size() - 8);
  static_cast<void>(shm::Segment::unlink(path));
  corpus.add("segment", "good", good);
  const auto block = [](Bytes& b) { return reinterpret_cast<shm::ControlBlock*>(b.data() + 8); };
  corpus.spoil("segment", "segment-bytes-lie", good, [&](Bytes& b) { block(b)->header.segment_bytes *= 2; });
  corpus.spoil("segment", "layout-bytes-lie", good,
               [&](Bytes& b) { block(b)->header.layout_bytes = ~std::uint64_t{0} - 8; });
  corpus.spoil("segment", "half-bytes-lie", good,
               [&](Bytes& b) { block(b)->header.half_bytes = std::uint64_t{1} << 62; });
  corpus.spoil("segment", "progress-words-lie", good,
               [&](Bytes& b) { block(b)->header.progress_words = ~std::uint64_t{0} / 4; });
  corpus.spoil("segment", "half-outside", good, [&](Bytes& b) { block(b)->header.half_offset[1] = file_bytes; });
}

void weight_indexes(const Corpus& corpus) {
  const auto add = [&](const std::string& name, std::string_view text) { corpus.add("weight_index", name, text); };
  add("good", R"({"metadata":{"total_size":10},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  add("empty-map", R"({"weight_map":{}})");
  add("no-map", R"({"weights":{}})");
  add("map-is-a-list", R"({"weight_map":["model-1.safetensors"]})");
  add("file-is-a-number", R"({"weight_map":{"a":1}})");
  add("escapes", R"({"weight_map":{"a":"../../etc/passwd"}})");
  add("absolute", R"({"weight_map":{"a":"/etc/passwd"}})");
  add("twice", R"({"weight_map":{"a":"1.safetensors","a":"2.safetensors"}})");
  add("deep", std::string(2000, '['));
  add("not-json", "{]");
}

void records(const Corpus& corpus) {
  HfRecord record;
  record.version = {{5, 6}, "step_6"};
  const std::string good = encode_record(record);
  const auto add = [&](const std::string& name, const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    corpus.add("hf_record", name, std::string_view(text));
  };
  corpus.add("hf_record", "good", std::string_view(good));
  add("label-is-no-utf8", "step_6", "step\xFF");
  add("label-is-a-number", "\"step_6\"", "6");
  add("format-unknown", "\"format\": 1", "\"format\": 2");
  add("epoch-zero", "0000000000000005", "0000000000000000");
  add("epoch-short", "0000000000000005", "5");
  add("number-negative", "\"number\": 6", "\"number\": -6");
  add("digest-upper-case", "\"root\": \"00", "\"root\": \"AB");
  add("no-files", "\"files\"", "\"fifes\"");
  corpus.add("hf_record", "array", std::string_view("[]"));
}

void exports(const Corpus& corpus) {
  const std::string good = R"(name = "toy"
architectures = ["Toy"]
ignored = ["*_extra"]
[sizes]
groups = "kv | heads"
n = "heads / groups"
[[rows]]
mcore = ["layers.{L}.qkv", "layers.{L}.attention"]
parts = "groups * [q: n * hd, k: hd, v: hd]"
hf.q = "l.{L}.q"
hf.k = "l.{L}.k"
hf.v = "l.{L}.v"
[[rows]]
mcore = "layers.{L}.experts.{E}.fc2"
view = "(two:2 f) h -> E/2 h two f"
hf = "l.{L}.down"
when = "moe"
[[rows]]
mcore = "norm"
hf = "norm"
add = 1
[[rows]]
mcore = "words"
parts = "[words: vocab, _: *]"
hf.words = "words"
[[rows]]
mcore = "bias"
hf = "bias"
optional = true
[[renames]]
mcore = "mtp.{M}."
to = "layers.{M + depth}."
[[constants]]
hf = "l.{L}.freq"
[[aliases]]
hf = "head"
of = "words"
when = "tied | false"
----
{"heads": 4, "kv": 2, "hd": 1, "moe": true, "vocab": 3, "tied": true, "depth": 1}
----
{"rank": 0, "pieces": [
{"key": "l.1.q", "dtype": "F32", "global_shape": [4, 3], "offset": [], "shape": []},
{"key": "l.1.k", "dtype": "F32", "global_shape": [2, 3], "offset": [], "shape": []},
{"key": "l.1.v", "dtype": "F32", "global_shape": [2, 3], "offset": [], "shape": []},
{"key": "l.0.down", "dtype": "BF16", "global_shape": [2, 3, 2, 2], "offset": [], "shape": []},
{"key": "norm", "dtype": "BF16", "global_shape": [3], "offset": [], "shape": []},
{"key": "words", "dtype": "BF16", "global_shape": [3, 2], "offset": [], "shape": []},
{"key": "head", "dtype": "BF16", "global_shape": [3, 2], "offset": [], "shape": []},
{"key": "l.0.freq", "dtype": "F32", "global_shape": [2], "offset": [], "shape": []}]}
----
{"rank": 0, "pieces": [
{"key": "mtp.0.qkv", "dtype": "F32", "global_shape": [8, 3], "offset": [0, 0], "shape": [3, 3]},
{"key": "layers.0.experts.0.fc2", "dtype": "BF16", "global_shape": [4, 3], "offset": [0, 0], "shape": [4, 3]},
{"key": "layers.0.experts.1.fc2", "dtype": "BF16", "global_shape": [4, 3], "offset": [0, 0], "shape": [3, 3]},
{"key": "norm", "dtype": "F32", "global_shape": [3], "offset": [0], "shape": [3]},
{"key": "words", "dtype": "BF16", "global_shape": [4, 2], "offset": [0, 0], "shape": [2, 2]},
{"key": "bias", "dtype": "BF16", "global_shape": [1], "offset": [0], "shape": [1]},
{"key": "an_extra", "dtype": "U8", "global_shape": [1], "offset": [0], "shape": [1]}]}
----
{"rank": 1, "pieces": [
{"key": "mtp.0.qkv", "dtype": "F32", "global_shape": [8, 3], "offset": [3, 0], "shape": [5, 3]},
{"key": "layers.0.experts.1.fc2", "dtype": "BF16", "global_shape": [4, 3], "offset": [3, 0], "shape": [1, 3]},
{"key": "norm", "dtype": "F32", "global_shape": [3], "offset": [0], "shape": [3]},
{"key": "words", "dtype": "BF16", "global_shape": [4, 2], "offset": [2, 0], "shape": [2, 2]}]}
)";
  const auto add = [&](const std::string& name, const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    corpus.add("export", name, std::string_view(text));
  };
  corpus.add("export", "good", std::string_view(good));
  add("size-of-itself", "heads / groups", "n / groups");
  add("place-beyond", "E/2", "E/1");
  add("number-huge", "\"hd\": 1", "\"hd\": 1e300");
  add("shape-overflows", "\"offset\": [3, 0], \"shape\": [5, 3]",
      "\"offset\": [3, 0], \"shape\": [18446744073709551615, 3]");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_corpus DIR\n";
    return 1;
  }
  const Corpus corpus(argv[1]);
  layouts(corpus);
  messages(corpus);
  deltas(corpus);
  class_deltas(corpus);
  packed_tiles(corpus);
  sidecars(corpus);
  headers(corpus);
  packed_layouts(corpus);
  kept_deltas(corpus);
  segments(corpus);
  weight_indexes(corpus);
  records(corpus);
  exports(corpus);
  return 0;
}
