// Tensor-parallel ranks against a whole agent: each gets exactly the bytes of its tiles. What those are is computed
// here from the layout's rectangles and the whole delta, by nothing that the pull itself uses. Sizes are Qwen2.5-7B's
// where they do not divide into tiles: vocabulary 151,936, ffn 18,944, hidden 3,584; the other dimension is small.
#include <algorithm>
#include <set>
#include <utility>

#include "delta/frame.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/held_port.hpp"

namespace deltasync::agent {
namespace {

enum class Parallel : std::uint8_t { rows, columns, none };

struct TpTensor {
  TensorSpec spec;
  Parallel parallel = Parallel::none;
};

std::vector<TpTensor> qwen_like() {
  return {{{"embed_tokens", Dtype::bf16, {151'936, 32}, {}, {}}, Parallel::rows},
          {{"q_proj", Dtype::bf16, {3'584, 64}, {}, {}}, Parallel::rows},
          {{"k_proj", Dtype::bf16, {512, 64}, {}, {}}, Parallel::rows},
          {{"q_bias", Dtype::bf16, {3'584}, {}, {}}, Parallel::columns},
          {{"o_proj", Dtype::bf16, {64, 3'584}, {}, {}}, Parallel::columns},
          {{"input_norm", Dtype::bf16, {3'584}, {}, {}}, Parallel::none},
          {{"gate_proj", Dtype::bf16, {18'944, 64}, {}, {}}, Parallel::rows},
          {{"up_proj", Dtype::bf16, {18'944, 64}, {}, {}}, Parallel::rows},
          {{"down_proj", Dtype::bf16, {64, 18'944}, {}, {}}, Parallel::columns},
          {{"final_norm", Dtype::f32, {3'584}, {}, {}}, Parallel::none}};
}

/// Cuts for up to `ways` ranks, along the dimension in which each tensor is divided.
std::vector<TensorSpec> specs_for(std::uint64_t ways) {
  std::vector<TensorSpec> specs;
  for (TpTensor& t : qwen_like()) {
    const std::uint64_t length = t.parallel == Parallel::rows ? t.spec.shape.front() : t.spec.shape.back();
    auto& cuts = t.parallel == Parallel::rows ? t.spec.row_cuts : t.spec.col_cuts;
    for (std::uint64_t i = 1; i < ways && t.parallel != Parallel::none; ++i) cuts.push_back(i * (length / ways));
    specs.push_back(t.spec);
  }
  return specs;
}

struct Rank {
  std::uint64_t index = 0;
  std::uint64_t count = 1;
};

/// The rectangle of a tensor that a rank keeps.
Rect rect_of(const TpTensor& t, const Tensor& tensor, Rank rank) {
  Rect r{0, 0, tensor.rows, tensor.cols};
  if (t.parallel == Parallel::rows) {
    r.rows = tensor.rows / rank.count;
    r.row = rank.index * r.rows;
  } else if (t.parallel == Parallel::columns) {
    r.cols = tensor.cols / rank.count;
    r.col = rank.index * r.cols;
  }
  return r;
}

bool overlap(const Rect& a, const Rect& b) {
  return a.row < b.row + b.rows && b.row < a.row + a.rows && a.col < b.col + b.cols && b.col < a.col + a.cols;
}

std::uint64_t varint(std::uint64_t value) {
  return value < 128 ? 1 : 1 + varint(value >> 7);
}

/// What of a delta has to travel for some tiles.
struct Expected {
  std::uint64_t record_bytes = 0;  ///< payloads and records without their gaps: the same however a frame is cut
  std::uint64_t frame_bytes = 0;   ///< all
};

class PartialPull : public AgentTest {
 protected:
  PartialPull() { options_.core.ring_bytes_max = 256u << 20; }

  void begin(std::uint64_t ways) {
    model_ = test::make_model(11, specs_for(ways));
    start_agent();
    next_version();
  }
  const Tensor& tensor(std::size_t i) const { return model_.layout->tensors()[i]; }

  std::vector<Slice> subscription(Rank rank) const {
    std::vector<Slice> s;
    const std::vector<TpTensor> tensors = qwen_like();
    for (const TpTensor& t : tensors) {
      const std::string& name = t.spec.name;
      switch (t.parallel) {
        case Parallel::rows: s.push_back(*row_slice(*model_.layout, name, rank.index, rank.count)); break;
        case Parallel::columns: s.push_back(*col_slice(*model_.layout, name, rank.index, rank.count)); break;
        case Parallel::none: s.push_back({name, std::nullopt}); break;
      }
    }
    return s;
  }
  /// By the definition: tiles that have an element of the rank's rectangles.
  std::set<std::uint64_t> tiles_of(Rank rank) const {
    const std::vector<TpTensor> tensors = qwen_like();
    std::set<std::uint64_t> tiles;
    for (std::uint64_t i = 0; i < model_.layout->tile_count(); ++i) {
      const Tile tile = tile_of(*model_.layout, i);
      if (overlap(tile.rect, rect_of(tensors[tile.tensor], tensor(tile.tensor), rank))) tiles.insert(i);
    }
    return tiles;
  }
  /// Frames of which all tiles are wanted travel as they are; parts of others that follow each other are joined.
  Expected expected(const delta::Delta& delta, const std::set<std::uint64_t>& tiles) const {
    Expected sum;
    std::uint64_t bytes = 0;  // of a frame so far, without its header
    std::uint64_t last = 0;
    const auto end_frame = [&] {
      if (bytes != 0) sum.frame_bytes += sizeof(delta::FrameHeader) + std::exchange(bytes, 0);
    };
    for (const delta::Frame& frame : delta.frames) {
      bool whole = true;
      for (std::uint64_t t = frame.first_tile; t <= frame.last_tile; ++t) whole = whole && tiles.count(t) != 0;
      if (whole) end_frame();
      const auto records = delta::parse_frame(*model_.layout, frame.bytes);
      EXPECT_TRUE(records);
      for (const delta::TileRecord& record : *records) {
        if (tiles.count(record.tile) == 0) continue;
        const std::uint64_t own = delta::record_bytes(record, record.payload.size()) + record.payload.size();
        sum.record_bytes += own;
        bytes += own + (bytes == 0 ? 1 : varint(record.tile - last - 1));
        last = record.tile;
      }
      if (whole || sizeof(delta::FrameHeader) + bytes >= delta::kJoinedBytes) end_frame();
    }
    end_frame();
    return sum;
  }
  std::uint64_t tile_bytes(std::uint64_t index) const {
    const Tile tile = tile_of(*model_.layout, index);
    return tile.rect.elements() * tensor(tile.tensor).element_bytes;
  }
  /// What a full transfer moves of tiles in whole bands, and what alone as raw tiles.
  void expect_full_bytes(const PullReport& report, std::uint64_t extent_before, std::uint64_t raw_before,
                         const std::set<std::uint64_t>& tiles) const {
    std::uint64_t bands = 0;
    std::uint64_t alone = 0;
    std::uint64_t records = 0;
    for (const std::uint64_t i : tiles) {
      const Tile tile = tile_of(*model_.layout, i);
      const std::uint64_t cols = tensor(tile.tensor).cols;
      std::uint64_t of_band = 0;  // columns of its band that are ours
      for (const std::uint64_t other : tiles) {
        const Tile o = tile_of(*model_.layout, other);
        if (o.tensor == tile.tensor && o.rect.row == tile.rect.row) of_band += o.rect.cols;
      }
      if (of_band == cols) {
        bands += tile_bytes(i);
        continue;
      }
      alone += tile_bytes(i);
      delta::TileRecord record;
      record.changed = static_cast<std::uint32_t>(tile.rect.elements());
      records += 1 + delta::record_bytes(record, tile_bytes(i));
    }
    const Metrics& m = agent_->core().metrics();
    const std::uint64_t extents = m.bytes_extent - extent_before;
    const std::uint64_t raw = m.bytes_raw_tiles - raw_before;
    EXPECT_EQ(extents, bands);
    EXPECT_EQ(report.wire_bytes - report.metadata_bytes, extents + raw);
    ASSERT_GE(raw, alone + records);
    const std::uint64_t headers = raw - alone - records;
    EXPECT_EQ(headers % sizeof(delta::FrameHeader), 0u);
    EXPECT_LE(headers, sizeof(delta::FrameHeader) * (2 + alone / (1u << 20)));
  }

  std::unique_ptr<Receiver> connect(Rank rank) {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(port());
    options.streams = 2;
    options.threads = 2;
    options.local = false;
    options.name = "rank " + std::to_string(rank.index) + " of " + std::to_string(rank.count);
    auto receiver = Receiver::connect(options, test_deadline());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    const Status bound = (*receiver)->bind(make_host_target(model_.layout), subscription(rank), test_deadline());
    EXPECT_TRUE(bound) << bound.error().to_string();
    return std::move(receiver).value();
  }
  PullReport pull(Receiver& receiver, const std::set<std::uint64_t>& tiles) {
    auto staged = receiver.pull({}, test_deadline());
    EXPECT_TRUE(staged) << staged.error().to_string();
    if (!staged) return {};
    EXPECT_TRUE((*staged)->commit());
    expect_holds(receiver, tiles);
    return (*staged)->report();
  }
  void expect_holds(Receiver& receiver, const std::set<std::uint64_t>& tiles) {
    const auto memory = host_target_memory(*receiver.target());
    for (const std::uint64_t i : tiles) {
      const Tile tile = tile_of(*model_.layout, i);
      const Tensor& t = tensor(tile.tensor);
      for (std::uint64_t r = 0; r < tile.rect.rows; ++r) {
        const std::uint64_t at = t.offset + (tile.rect.row + r) * t.row_bytes() + tile.rect.col * t.element_bytes;
        ASSERT_TRUE(std::equal(memory.begin() + static_cast<std::ptrdiff_t>(at),
                               memory.begin() + static_cast<std::ptrdiff_t>(at + tile.rect.cols * t.element_bytes),
                               model_.half.begin() + static_cast<std::ptrdiff_t>(at)))
            << i;
      }
    }
  }
  const delta::Delta& newest_delta() const { return *agent_->core().versions().snapshot()->ring.back()->delta; }

  /// Bytes of records of tiles that all ranks keep.
  std::uint64_t replicated(const delta::Delta& delta) const {
    const std::vector<TpTensor> tensors = qwen_like();
    std::set<std::uint64_t> tiles;
    for (std::uint64_t i = 0; i < model_.layout->tile_count(); ++i) {
      if (tensors[model_.layout->tensor_of_tile(i)].parallel == Parallel::none) tiles.insert(i);
    }
    return expected(delta, tiles).record_bytes;
  }

  void expect_exact(std::uint64_t ways);
};

/// A full transfer, a delta, and a merged delta for each of `ways` ranks.
void PartialPull::expect_exact(std::uint64_t ways) {
  std::vector<std::unique_ptr<Receiver>> ranks;
  std::vector<std::set<std::uint64_t>> tiles;
  std::uint64_t full_bytes = 0;
  for (std::uint64_t i = 0; i < ways; ++i) {
    const Rank rank{i, ways};
    tiles.push_back(tiles_of(rank));
    ranks.push_back(connect(rank));
    const Metrics& m = agent_->core().metrics();
    const std::uint64_t extents = m.bytes_extent;
    const std::uint64_t raw = m.bytes_raw_tiles;
    const PullReport report = pull(*ranks[i], tiles[i]);
    EXPECT_EQ(report.mode, PullMode::full);
    EXPECT_EQ(report.tiles, tiles[i].size());
    expect_full_bytes(report, extents, raw, tiles[i]);
    std::uint64_t slices = 0;
    const std::vector<TpTensor> tensors = qwen_like();
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      slices += rect_of(tensors[t], tensor(t), rank).elements() * tensor(t).element_bytes;
    }
    EXPECT_EQ(report.full_bytes, slices) << "a slice along the cuts is whole tiles";
    full_bytes += slices;
  }
  std::uint64_t everywhere = 0;  // bytes of tensors that all ranks keep
  for (std::size_t t = 0; t < qwen_like().size(); ++t) {
    if (qwen_like()[t].parallel == Parallel::none) everywhere += tensor(t).bytes;
  }
  EXPECT_EQ(full_bytes - (ways - 1) * everywhere, model_.layout->model_bytes());
  next_version(0.01);
  std::uint64_t sum = 0;
  const delta::Delta& step = newest_delta();
  for (std::uint64_t i = 0; i < ways; ++i) {
    const PullReport report = pull(*ranks[i], tiles[i]);
    EXPECT_EQ(report.mode, PullMode::delta);
    const Expected own = expected(step, tiles[i]);
    EXPECT_EQ(report.wire_bytes - report.metadata_bytes, own.frame_bytes);
    EXPECT_LT(report.metadata_bytes, 4096u);
    sum += own.record_bytes;
  }
  std::set<std::uint64_t> all;
  for (std::uint64_t t = 0; t < model_.layout->tile_count(); ++t) all.insert(all.end(), t);
  EXPECT_EQ(expected(step, all).frame_bytes, step.frame_bytes) << "what this test counts on";
  EXPECT_EQ(sum - (ways - 1) * replicated(step), expected(step, all).record_bytes)
      << "no record travels to two ranks, and none to nobody";
  for (int i = 0; i < 3; ++i) next_version(0.003);
  const std::uint64_t merges = agent_->core().metrics().merges;
  for (std::uint64_t i = 0; i < ways; ++i) {
    const PullReport report = pull(*ranks[i], tiles[i]);
    EXPECT_EQ(report.mode, PullMode::delta);
    EXPECT_EQ(report.delta_steps, 1u);
  }
  EXPECT_EQ(agent_->core().metrics().merges, merges + 1) << "one merged delta is cut for all ranks";
}

TEST_F(PartialPull, TwoRanks) {
  begin(8);
  expect_exact(2);
}

TEST_F(PartialPull, FourRanks) {
  begin(8);
  expect_exact(4);
}

TEST_F(PartialPull, EightRanks) {
  begin(8);
  expect_exact(8);
}

/// Without cuts a slice brings the tiles at its borders whole: more than its own bytes, never another tile's.
TEST_F(PartialPull, SlicesThroughTiles) {
  begin(1);
  std::vector<std::unique_ptr<Receiver>> ranks;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const auto tiles = tiles_of({i, 4});
    const auto receiver = connect({i, 4});
    const PullReport report = pull(*receiver, tiles);
    std::uint64_t bytes = 0;
    for (const std::uint64_t t : tiles) bytes += tile_bytes(t);
    EXPECT_EQ(report.full_bytes, bytes);
    EXPECT_EQ(report.tiles, tiles.size());
    next_version(0.01);
    const PullReport delta = pull(*receiver, tiles);
    EXPECT_EQ(delta.mode, PullMode::delta);
    EXPECT_EQ(delta.wire_bytes - delta.metadata_bytes, expected(newest_delta(), tiles).frame_bytes);
  }
}

/// A rank and a receiver of everything are served side by side, and the agent's restart costs neither its state.
TEST_F(PartialPull, ARestartOfTheAgent) {
  const test::HeldPort at;
  options_.pull.listen.port = at.number();
  begin(8);
  const auto tiles = tiles_of({3, 8});
  const auto receiver = connect({3, 8});
  pull(*receiver, tiles);
  stop_agent();
  start_agent();
  ASSERT_TRUE(eventually([&] { return served() != nullptr; }));
  const PullReport same = pull(*receiver, tiles);
  EXPECT_EQ(same.mode, PullMode::up_to_date) << "its root is that of the version which the segment kept";
  writer_.reset();
  next_version(0.01);
  EXPECT_EQ(pull(*receiver, tiles).mode, PullMode::delta);
}

}  // namespace
}  // namespace deltasync::agent
