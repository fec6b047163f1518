// A model that several trainer nodes write together. The agent of each node serves a layout of its own, its part's,
// with a tensor for each rectangle of the whole layout that the node holds; the sidecar says where these lie. Receivers
// put the parts together (ReceiverOptions::endpoint).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/writer.hpp"

namespace deltasync {

/// What the writers of one node hold, as few rectangles as neighbours make; sorted.
///   - Errc::out_of_range, Errc::coverage: a rectangle outside its tensor, or two that overlap.
Result<std::vector<TensorSlice>> join_slices(const Layout& layout, std::span<const TensorSlice> slices);

/// Each element of the layout is one node's at least; what several hold are replicas. Before the first version.
/// `nodes`: the name of each, and what it holds.
///   - Errc::out_of_range.
///   - Errc::coverage: tensor and rows that nobody holds, and the nodes that hold other rows.
Status check_nodes(const Layout& whole, std::span<const std::pair<std::string, std::vector<TensorSlice>>> nodes);

/// Cuts at the edges of these rectangles, so that each is whole tiles. For the layout of all nodes together: every node
/// gives those of every other too.
///   - Errc::out_of_range: a rectangle outside its tensor.
Status add_cuts(std::vector<TensorSpec>& specs, std::span<const TensorSlice> slices);

/// The layout and the sidecar that the writers of a node attach with. The node holds these rectangles of the whole
/// layout, which are disjoint and may touch each other. `members`: name and endpoint (HOST:PORT of the agent, as
/// receivers reach it) of every node, the same list at each; this one is number `self`.
///   - Errc::out_of_range, Errc::coverage: a rectangle outside its tensor, or two that overlap.
///   - Errc::invalid_argument: an edge that is no cut of `whole` (add_cuts()), nothing to hold, no such member, or two
///     of one name.
///
/// ```cpp
/// std::vector<TensorSpec> specs = {{.name = "up.weight", .dtype = Dtype::bf16, .shape = {1024, 64}}};
/// const std::vector<TensorSlice> held = {{0, {0, 0, 512, 64}}};  // the other node has the rest
/// DS_TRY(add_cuts(specs, held));
/// DS_ASSIGN(const LayoutPtr whole, Layout::build(specs));
/// const std::vector<std::pair<std::string, std::string>> nodes = {{"a", "10.0.0.1:7070"}, {"b", "10.0.0.2:7070"}};
/// DS_ASSIGN(const auto part, make_part(whole, make_sidecar(*whole), held, nodes, 0));
/// DS_ASSIGN(const auto slices, slices_in_part(part.second, *part.first, held));
/// ```
Result<std::pair<LayoutPtr, Sidecar>> make_part(LayoutPtr whole, const Sidecar& sidecar,
                                                std::span<const TensorSlice> held,
                                                const std::vector<std::pair<std::string, std::string>>& members,
                                                std::uint32_t self);

/// Rectangles of the whole layout as those of the part's, in the same order.
///   - Errc::out_of_range: one that no tensor of the part has all of, which is named.
///   - Errc::invalid_argument: the sidecar is not that of a part.
Result<std::vector<TensorSlice>> slices_in_part(const Sidecar& sidecar, const Layout& layout,
                                                std::span<const TensorSlice> slices);

}  // namespace deltasync
