#include <algorithm>
#include <map>
#include <utility>

#include "format/rect_set.hpp"
#include "placement/bind.hpp"
#include "placement/decoder.hpp"

namespace deltasync {
namespace {

struct Range {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

std::string shape_text(std::uint64_t outs, std::uint64_t ins) {
  return std::to_string(outs) + "×" + std::to_string(ins);
}

Result<Range> equal_part(std::uint64_t length, Rank rank, const char* what) {
  if (rank.index >= rank.count) {
    return Error(Errc::invalid_argument,
                 "there is no rank " + std::to_string(rank.index) + " of " + std::to_string(rank.count));
  }
  if (length % rank.count != 0) {
    return Error(Errc::invalid_argument, std::to_string(length) + " " + what + " cannot be divided by " +
                                             std::to_string(rank.count) + " ranks");
  }
  const std::uint64_t count = length / rank.count;
  return Range{rank.index * count, count};
}

/// The key heads of a rank: its part of them, or the one that it shares with its neighbours.
Result<Range> kv_part(std::uint64_t kv_heads, Rank rank) {
  if (kv_heads == 0 || rank.count <= kv_heads) return equal_part(kv_heads, rank, "key heads");
  if (rank.index >= rank.count || rank.count % kv_heads != 0) {
    return Error(Errc::invalid_argument, std::to_string(kv_heads) + " key heads cannot be shared by " +
                                             std::to_string(rank.count) + " ranks (rank " + std::to_string(rank.index) +
                                             ")");
  }
  return Range{rank.index / (rank.count / kv_heads), 1};
}

/// Elements of a range of heads among `outs`.
Result<Range> of_heads(Range heads, std::uint64_t all_heads, std::uint64_t outs) {
  if (all_heads == 0 || outs % all_heads != 0) {
    return Error(Errc::invalid_argument,
                 std::to_string(outs) + " outputs are not those of " + std::to_string(all_heads) + " heads");
  }
  const std::uint64_t each = outs / all_heads;
  return Range{heads.first * each, heads.count * each};
}

std::string with_number(const std::string& pattern, std::uint64_t number) {
  const std::size_t at = pattern.find("{}");
  if (at == std::string::npos) return pattern;
  return pattern.substr(0, at) + std::to_string(number) + pattern.substr(at + 2);
}

}  // namespace

// ---- views -------------------------------------------------------------------------------------------------------

ParamView ParamView::dense(std::uint32_t memory, std::uint64_t outs, std::uint64_t ins, std::uint64_t element_bytes,
                           std::uint64_t offset) {
  return {memory, offset, outs, ins, ins * element_bytes, element_bytes};
}

ParamView ParamView::dense_transposed(std::uint32_t memory, std::uint64_t outs, std::uint64_t ins,
                                      std::uint64_t element_bytes, std::uint64_t offset) {
  return {memory, offset, outs, ins, element_bytes, outs * element_bytes};
}

ParamView ParamView::out_range(std::uint64_t first, std::uint64_t count) const {
  ParamView part = *this;
  part.outs = first > outs || count > outs - first ? 0 : count;
  part.offset += first * out_stride;
  return part;
}

ParamView ParamView::in_range(std::uint64_t first, std::uint64_t count) const {
  ParamView part = *this;
  part.ins = first > ins || count > ins - first ? 0 : count;
  part.offset += first * in_stride;
  return part;
}

ParamView StackedView::at(std::uint64_t index) const {
  ParamView view = first;
  view.offset += index * stride;
  return view;
}

std::vector<Expert> named_experts(const std::string& gate, const std::string& up, const std::string& down,
                                  std::uint64_t count) {
  std::vector<Expert> experts;
  for (std::uint64_t e = 0; e < count; ++e) {
    experts.push_back({{with_number(gate, e), {}}, {with_number(up, e), {}}, {with_number(down, e), {}}});
  }
  return experts;
}

std::vector<std::uint64_t> consecutive_experts(std::uint64_t experts, Rank rank) {
  std::vector<std::uint64_t> local;
  if (rank.index >= rank.count) return local;
  const auto begin = [&](std::uint64_t i) { return i * (experts / rank.count) + std::min(i, experts % rank.count); };
  for (std::uint64_t e = begin(rank.index); e < begin(rank.index + 1); ++e) local.push_back(e);
  return local;
}

// ---- one slice -----------------------------------------------------------------------------------------------------

/// An HF slice as out × in.
struct DecoderPlacement::Block {
  std::string tensor;
  Rect rect;
  bool one_dim = false;

  std::uint64_t outs() const { return one_dim ? rect.cols : rect.rows; }
  std::uint64_t ins() const { return one_dim ? 1 : rect.cols; }
};

DecoderPlacement::DecoderPlacement(LayoutPtr layout, Rank rank) : layout_(std::move(layout)), rank_(rank) {}

std::uint32_t DecoderPlacement::add_memory(LiveMemory memory) {
  plan_.memories.push_back(std::move(memory));
  return static_cast<std::uint32_t>(plan_.memories.size() - 1);
}

Result<DecoderPlacement::Block> DecoderPlacement::find(const Slice& from) const {
  const auto index = layout_->find(from.tensor);
  if (!index) return Error(Errc::not_found, "the layout has no tensor '" + from.tensor + "'");
  DS_ASSIGN(const TensorSlice slice, find_slice(*layout_, from.tensor, from.rect, "tensor", *index));
  return Block{from.tensor, slice.rect, layout_->tensors()[*index].spec.shape.size() == 1};
}

Status DecoderPlacement::place(const Block& block, std::uint64_t out, std::uint64_t outs, std::uint64_t in,
                               std::uint64_t ins, const ParamView& to) {
  if (to.outs != outs || to.ins != ins) {
    return Error(Errc::invalid_argument, "'" + block.tensor + "': " + shape_text(outs, ins) + " into a place of " +
                                             shape_text(to.outs, to.ins));
  }
  const Rect& r = block.rect;
  PlacedSlice slice{block.tensor, {}, to.memory, to.offset, to.out_stride, to.in_stride};
  if (block.one_dim) {
    slice.rect = {r.row, r.col + out, r.rows, outs};
    std::swap(slice.row_stride, slice.col_stride);
  } else {
    slice.rect = {r.row + out, r.col + in, outs, ins};
  }
  plan_.slices.push_back(std::move(slice));
  accounted_.push_back({block.tensor, r});
  return {};
}

Status DecoderPlacement::place_outs(const Block& block, std::uint64_t out, std::uint64_t outs, const ParamView& to) {
  return place(block, out, outs, 0, block.ins(), to);
}

Status DecoderPlacement::out_part(const Block& block, Rank rank, const ParamView& to) {
  auto part = equal_part(block.outs(), rank, "outputs");
  if (!part.ok()) return std::move(part).error().with_context("'" + block.tensor + "'");
  return place_outs(block, part->first, part->count, to);
}

Status DecoderPlacement::in_part(const Block& block, Rank rank, const ParamView& to) {
  if (block.one_dim) return Error(Errc::invalid_argument, "'" + block.tensor + "' has no inputs to divide");
  auto part = equal_part(block.ins(), rank, "inputs");
  if (!part.ok()) return std::move(part).error().with_context("'" + block.tensor + "'");
  return place(block, 0, block.outs(), part->first, part->count, to);
}

Status DecoderPlacement::whole(const Slice& from, const ParamView& to) {
  DS_ASSIGN(const Block block, find(from));
  return place_outs(block, 0, block.outs(), to);
}

Status DecoderPlacement::out_part(const Slice& from, const ParamView& to) {
  DS_ASSIGN(const Block block, find(from));
  return out_part(block, rank_, to);
}

Status DecoderPlacement::in_part(const Slice& from, const ParamView& to) {
  DS_ASSIGN(const Block block, find(from));
  return in_part(block, rank_, to);
}

Status DecoderPlacement::ignore(const Slice& from) {
  DS_ASSIGN(const Block block, find(from));
  accounted_.push_back({block.tensor, block.rect});
  return {};
}

// ---- fused, padded, stacked
// ------------------------------------------------------------------------------------------

Status DecoderPlacement::qkv(const Slice& q, const Slice& k, const Slice& v, std::uint64_t heads,
                             std::uint64_t kv_heads, const ParamView& to) {
  struct Part {
    const Slice& from;
    bool is_q;
  };
  std::uint64_t below = 0;
  for (const Part& part : {Part{q, true}, Part{k, false}, Part{v, false}}) {
    DS_ASSIGN(const Block block, find(part.from));
    const auto range = [&]() -> Result<Range> {
      if (part.is_q) {
        DS_ASSIGN(const Range own, equal_part(heads, rank_, "heads"));
        return of_heads(own, heads, block.outs());
      }
      DS_ASSIGN(const Range own, kv_part(kv_heads, rank_));
      return of_heads(own, kv_heads, block.outs());
    }();
    if (!range.ok()) return Error(range.error()).with_context("'" + block.tensor + "'");
    DS_TRY(place_outs(block, range->first, range->count, to.out_range(below, range->count)));
    below += range->count;
  }
  if (below == to.outs) return {};
  return Error(Errc::invalid_argument, "'" + q.tensor + "', '" + k.tensor + "' and '" + v.tensor + "' have " +
                                           std::to_string(below) + " outputs on this rank, their place " +
                                           std::to_string(to.outs));
}

Status DecoderPlacement::gate_up(const Slice& gate, const Slice& up, Rank rank, const ParamView& to, GateUp order) {
  DS_ASSIGN(const Block gate_block, find(gate));
  DS_ASSIGN(const Block up_block, find(up));
  if (to.outs % 2 != 0) {
    return Error(Errc::invalid_argument, "'" + gate.tensor + "' and '" + up.tensor + "' into a place of " +
                                             std::to_string(to.outs) + " outputs, which are no two halves");
  }
  const std::uint64_t half = to.outs / 2;
  const bool gate_first = order == GateUp::gate_first;
  DS_TRY(out_part(gate_block, rank, to.out_range(gate_first ? 0 : half, half)));
  return out_part(up_block, rank, to.out_range(gate_first ? half : 0, half));
}

Status DecoderPlacement::gate_up(const Slice& gate, const Slice& up, const ParamView& to, GateUp order) {
  return gate_up(gate, up, rank_, to, order);
}

Status DecoderPlacement::vocabulary(const Slice& from, std::uint64_t padded, const ParamView& to) {
  DS_ASSIGN(const Block block, find(from));
  const std::string name = "'" + block.tensor + "'";
  auto part = equal_part(padded, rank_, "padded rows");
  if (!part.ok()) return std::move(part).error().with_context(name);
  if (padded < block.outs()) {
    return Error(Errc::invalid_argument,
                 name + " has " + std::to_string(block.outs()) + " rows, padded " + std::to_string(padded));
  }
  if (to.outs != part->count) {
    return Error(Errc::invalid_argument,
                 name + ": " + std::to_string(part->count) + " padded rows into a place of " + std::to_string(to.outs));
  }
  const std::uint64_t first = std::min(part->first, block.outs());
  const std::uint64_t rows = std::min(part->first + part->count, block.outs()) - first;
  if (rows == 0) return ignore(from);  // padding alone
  return place_outs(block, first, rows, to.out_range(0, rows));
}

Status DecoderPlacement::experts(std::span<const Expert> experts, std::span<const std::uint64_t> local, Rank rank,
                                 const StackedView& gate_up_view, const StackedView& down_view, GateUp order) {
  if (local.size() != gate_up_view.count || local.size() != down_view.count) {
    return Error(Errc::invalid_argument, std::to_string(local.size()) + " experts into " +
                                             std::to_string(gate_up_view.count) + " and " +
                                             std::to_string(down_view.count) + " places");
  }
  for (std::size_t i = 0; i < local.size(); ++i) {
    if (local[i] >= experts.size()) {
      return Error(Errc::invalid_argument,
                   "there is no expert " + std::to_string(local[i]) + " of " + std::to_string(experts.size()));
    }
    const Expert& expert = experts[local[i]];
    DS_TRY(gate_up(expert.gate, expert.up, rank, gate_up_view.at(i), order));
    DS_ASSIGN(const Block down, find(expert.down));
    DS_TRY(in_part(down, rank, down_view.at(i)));
  }
  for (const Expert& expert : experts) {
    for (const Slice* slice : {&expert.gate, &expert.up, &expert.down}) DS_TRY(ignore(*slice));
  }
  return {};
}

// ---- the plan ------------------------------------------------------------------------------------------------------

PlacementPlan DecoderPlacement::plan() const {
  PlacementPlan plan = plan_;
  // What is known to be placed or ignored, tensor by tensor: an ignored part is named once.
  std::map<std::string_view, RectSet> known;
  for (const PlacedSlice& slice : plan_.slices) known[slice.tensor].add(slice.rect);
  for (const Slice& slice : accounted_) {
    for (const Rect& part : known[slice.tensor].add(*slice.rect)) plan.ignored.push_back({slice.tensor, part});
  }
  return plan;
}

}  // namespace deltasync
