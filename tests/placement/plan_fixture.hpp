// Made-up engines: random plans over buffers of their own, and a slow reference that knows every element's places.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "deltasync/placement.hpp"
#include "format/tiling.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

/// The live memories of an engine, by the order of the plan's. Addresses stay.
class Engine {
 public:
  static constexpr std::size_t kGuardBytes = 64;
  static constexpr std::byte kUntouched{0xEE};

  /// Aligned for every element.
  LiveMemory add(const std::string& name, std::uint64_t bytes) {
    buffers_.push_back(std::make_unique<std::vector<std::uint64_t>>((bytes + 2 * kGuardBytes) / 8 + 1));
    bytes_.push_back(bytes);
    std::memset(buffers_.back()->data(), static_cast<int>(kUntouched), buffers_.back()->size() * 8);
    return {name, base(buffers_.size() - 1), bytes, {}, {}};
  }
  std::byte* base(std::size_t memory) const {
    return reinterpret_cast<std::byte*>(buffers_[memory]->data()) + kGuardBytes;
  }
  /// As they were at first.
  void wipe() {
    for (auto& buffer : buffers_) std::memset(buffer->data(), static_cast<int>(kUntouched), buffer->size() * 8);
  }
  void restore(const std::vector<std::vector<std::uint64_t>>& contents) {
    for (std::size_t i = 0; i < buffers_.size(); ++i)
      std::copy(contents[i].begin(), contents[i].end(), buffers_[i]->begin());
  }
  /// All bytes, guards too.
  std::vector<std::vector<std::uint64_t>> contents() const {
    std::vector<std::vector<std::uint64_t>> all;
    for (const auto& buffer : buffers_) all.push_back(*buffer);
    return all;
  }
  std::size_t size() const { return buffers_.size(); }

 private:
  std::vector<std::unique_ptr<std::vector<std::uint64_t>>> buffers_;
  std::vector<std::uint64_t> bytes_;
};

inline std::byte* element_of(const PlacementPlan& plan, const PlacedSlice& s, std::uint64_t row, std::uint64_t col) {
  return plan.memories[s.memory].base + s.offset + (row - s.rect.row) * s.row_stride +
         (col - s.rect.col) * s.col_stride;
}

inline bool has(const Rect& r, std::uint64_t row, std::uint64_t col) {
  return row >= r.row && row < r.row + r.rows && col >= r.col && col < r.col + r.cols;
}

/// Every place of an element, in the plan's order.
inline std::vector<std::byte*> places_of(const PlacementPlan& plan, const std::string& tensor, std::uint64_t row,
                                         std::uint64_t col) {
  std::vector<std::byte*> places;
  for (const PlacedSlice& s : plan.slices) {
    if (s.tensor == tensor && has(s.rect, row, col)) places.push_back(element_of(plan, s, row, col));
  }
  return places;
}

/// Writes a half's elements where the plan says, one by one.
inline void write_by_plan(const Layout& layout, const PlacementPlan& plan, const std::vector<std::byte>& half) {
  for (const PlacedSlice& s : plan.slices) {
    const Tensor& t = layout.tensors()[*layout.find(s.tensor)];
    for (std::uint64_t r = s.rect.row; r < s.rect.row + s.rect.rows; ++r) {
      std::byte* to = element_of(plan, s, r, s.rect.col);
      const std::byte* from = half.data() + t.offset + r * t.row_bytes() + s.rect.col * t.element_bytes;
      for (std::uint64_t c = 0; c < s.rect.cols; ++c, to += s.col_stride, from += t.element_bytes) {
        std::memcpy(to, from, t.element_bytes);
      }
    }
  }
}

/// What live memory is once a half is placed, all bytes that have no place untouched.
inline std::vector<std::vector<std::uint64_t>> placed_contents(Engine& engine, const Layout& layout,
                                                               const PlacementPlan& plan,
                                                               const std::vector<std::byte>& half) {
  const auto live = engine.contents();
  engine.wipe();
  write_by_plan(layout, plan, half);
  auto placed = engine.contents();
  engine.restore(live);
  return placed;
}

/// A tile's bytes in a half, row by row without gaps.
inline std::vector<std::byte> tile_bytes(const Layout& layout, const std::vector<std::byte>& half,
                                         std::uint64_t index) {
  const Tile tile = tile_of(layout, index);
  const Tensor& t = layout.tensors()[tile.tensor];
  std::vector<std::byte> bytes;
  for (std::uint64_t r = tile.rect.row; r < tile.rect.row + tile.rect.rows; ++r) {
    const std::byte* row = half.data() + t.offset + r * t.row_bytes() + tile.rect.col * t.element_bytes;
    bytes.insert(bytes.end(), row, row + tile.rect.cols * t.element_bytes);
  }
  return bytes;
}

/// Random plans: every tensor is cut into rectangles, of which each is placed once, twice, or ignored; the places are
/// rows with gaps, transposed, strided both ways, side by side, or interleaved.
class RandomPlan {
 public:
  enum class Ignore : std::uint8_t {
    some,
    parts_of_tiles,  ///< every tile is needed
    nothing,
  };
  RandomPlan(const Layout& layout, std::uint64_t seed, Ignore ignore = Ignore::some) : random_(seed), ignore_(ignore) {
    const std::uint64_t memories = 1 + random_.below(4);
    used_.assign(memories, 0);
    for (const Tensor& t : layout.tensors()) {
      if (t.tile_count != 0) cut(t, {0, 0, t.rows, t.cols}, random_.below(4));
    }
    if (plan.slices.empty()) {  // one at least
      for (const Tensor& t : layout.tensors()) {
        if (t.tile_count == 0) continue;
        std::erase_if(plan.ignored, [&](const Slice& s) { return s.tensor == t.spec.name; });
        place(t, {0, 0, t.rows, t.cols});
        break;
      }
    }
    for (std::size_t i = 0; i < used_.size(); ++i) {
      plan.memories.push_back(engine.add("memory." + std::to_string(i), used_[i] + 8));
    }
    shuffle();
  }

  Engine engine;
  PlacementPlan plan;

 private:
  void cut(const Tensor& t, const Rect& r, std::uint64_t depth) {
    if (depth > 0 && (r.rows > 1 || r.cols > 1)) {
      Rect a = r;
      Rect b = r;
      if (r.cols == 1 || (r.rows > 1 && random_.below(2) == 0)) {
        a.rows = 1 + random_.below(r.rows - 1);
        b.row += a.rows;
        b.rows -= a.rows;
      } else {
        a.cols = 1 + random_.below(r.cols - 1);
        b.col += a.cols;
        b.cols -= a.cols;
      }
      cut(t, a, depth - 1);
      cut(t, b, depth - 1);
      return;
    }
    const bool has_place = !plan.slices.empty() && plan.slices.back().tensor == t.spec.name;
    const bool may = ignore_ == Ignore::some || (ignore_ == Ignore::parts_of_tiles && t.tile_count == 1 && has_place);
    if (may && random_.below(4) == 0) {
      plan.ignored.push_back({t.spec.name, r});
      return;
    }
    place(t, r);
    if (random_.below(5) == 0) place(t, r);
    if (random_.below(6) == 0 && r.rows > 1) {  // a part of it once more
      Rect part = r;
      part.row += random_.below(r.rows);
      part.rows = 1 + random_.below(r.row + r.rows - part.row);
      place(t, part);
    }
  }

  void place(const Tensor& t, const Rect& r) {
    const std::uint64_t w = t.element_bytes;
    const auto memory = static_cast<std::uint32_t>(random_.below(used_.size()));
    std::uint64_t& used = used_[memory];
    used = (used + random_.below(3) * w + w - 1) / w * w;
    PlacedSlice s{t.spec.name, r, memory, used, r.cols * w, w};
    const std::uint64_t gap = random_.below(3) * w;
    switch (random_.below(5)) {
      case 0: break;  // dense
      case 1: s.row_stride += gap; break;
      case 2:  // transposed
        s.row_stride = w;
        s.col_stride = r.rows * w + gap;
        break;
      case 3:  // strided both ways
        s.col_stride = 2 * w;
        s.row_stride = 2 * w * r.cols + gap;
        break;
      default:  // beside the same once more, which is interleaved with it
        s.col_stride = 2 * w;
        s.row_stride = 2 * w * r.cols;
        plan.slices.push_back(s);
        plan.slices.back().offset += w;
        used += w;
        break;
    }
    used += (r.rows - 1) * s.row_stride + (r.cols - 1) * s.col_stride + w;
    plan.slices.push_back(std::move(s));
  }

  void shuffle() {
    for (std::size_t i = plan.slices.size(); i > 1; --i) std::swap(plan.slices[i - 1], plan.slices[random_.below(i)]);
  }

  Random random_;
  const Ignore ignore_;
  std::vector<std::uint64_t> used_;
};

}  // namespace deltasync::test
