#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "export/plan.hpp"

namespace deltasync::exporting {
namespace {

using Json = nlohmann::json;

Result<std::vector<std::uint64_t>> sizes_of(const Json& piece, const char* key) {
  const auto found = piece.find(key);
  if (found == piece.end() || !found->is_array())
    return Error(Errc::invalid_argument, std::string("'") + key + "' is to be a list");
  if (found->size() > kTensorDimsMax) return Error(Errc::invalid_argument, std::string("'") + key + "' is too long");
  std::vector<std::uint64_t> out;
  for (const Json& size : *found) {
    if (!size.is_number_unsigned())
      return Error(Errc::invalid_argument, std::string("'") + key + "' is to have whole numbers");
    out.push_back(size.get<std::uint64_t>());
  }
  return out;
}

Result<std::string> text_of(const Json& piece, const char* key) {
  const auto found = piece.find(key);
  if (found == piece.end() || !found->is_string())
    return Error(Errc::invalid_argument, std::string("'") + key + "' is to be a text");
  return found->get<std::string>();
}

Result<ShardPiece> piece_of(const Json& json) {
  if (!json.is_object()) return Error(Errc::invalid_argument, "is to be an object");
  ShardPiece piece;
  DS_ASSIGN(piece.key, text_of(json, "key"));
  DS_ASSIGN(const std::string dtype, text_of(json, "dtype"));
  const auto known = dtype_from_string(dtype);
  if (!known) return Error(Errc::unsupported, "no dtype '" + dtype + "'");
  piece.dtype = *known;
  DS_ASSIGN(piece.global_shape, sizes_of(json, "global_shape"));
  DS_ASSIGN(piece.offset, sizes_of(json, "offset"));
  DS_ASSIGN(piece.shape, sizes_of(json, "shape"));
  return piece;
}

}  // namespace

Result<std::pair<std::uint32_t, std::vector<ShardPiece>>> parse_shard(std::string_view json, std::string_view file) {
  const std::string name(file);
  const Json shard = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!shard.is_object()) return Error(Errc::invalid_argument, name + ": no JSON object");
  const auto rank = shard.find("rank");
  const auto pieces = shard.find("pieces");
  if (rank == shard.end() || !rank->is_number_unsigned() || *rank > UINT32_MAX) {
    return Error(Errc::invalid_argument, name + ": 'rank' is to be a whole number");
  }
  if (pieces == shard.end() || !pieces->is_array())
    return Error(Errc::invalid_argument, name + ": 'pieces' is to be a list");
  std::pair<std::uint32_t, std::vector<ShardPiece>> out{rank->get<std::uint32_t>(), {}};
  for (const Json& entry : *pieces) {
    auto piece = piece_of(entry);
    if (!piece) return std::move(piece).error().with_context(name + ": piece " + std::to_string(out.second.size()));
    out.second.push_back(*std::move(piece));
  }
  return out;
}

std::string to_json(const ExportPlan& plan) {
  Json tensors = Json::array();
  for (const Tensor& tensor : plan.layout->tensors()) {
    tensors.push_back(
        {{"name", tensor.spec.name}, {"dtype", to_string(tensor.spec.dtype)}, {"shape", tensor.spec.shape}});
  }
  Json copies = Json::array();
  for (const ExportCopy& copy : plan.copies) {
    std::vector<std::uint64_t> counts;
    std::vector<std::uint64_t> from;
    std::vector<std::uint64_t> to;
    for (const CopyStep& step : copy.steps) {
      counts.push_back(step.count);
      from.push_back(step.source_stride);
      to.push_back(step.target_stride);
    }
    copies.push_back({{"tensor", copy.tensor},
                      {"rank", copy.rank},
                      {"piece", copy.piece},
                      {"counts", counts},
                      {"source_offset", copy.source_offset},
                      {"source_strides", from},
                      {"target_offset", copy.target_offset},
                      {"target_strides", to},
                      {"add", copy.add},
                      {"row", plan.rows[copy.row]}});
  }
  Json quantised = Json::array();
  for (const QuantisedTensor& one : plan.quantised) {
    quantised.push_back({{"tensor", one.tensor},
                         {"scale", one.scale},
                         {"formula", one.by_block ? "block" : "tensor"},
                         {"block", {one.block_rows, one.block_cols}},
                         {"powers_of_two", one.powers_of_two}});
  }
  const Json json = {{"format", "deltasync export plan"},
                     {"version", 1},
                     {"family", plan.family},
                     {"tensors", tensors},
                     {"copies", copies},
                     {"quantised", quantised},
                     {"constants", plan.constants},
                     {"ignored", plan.ignored}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace deltasync::exporting
