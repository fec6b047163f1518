#include "export/trainer_tensors.hpp"

#include <algorithm>

namespace deltasync::exporting {
namespace {

constexpr std::size_t kPiecesShown = 8;  ///< in a message

std::uint64_t elements_of(std::span<const std::uint64_t> shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t size : shape) count *= size;
  return count;
}

bool overlap(const ShardPiece& a, const ShardPiece& b) {
  for (std::size_t dim = 0; dim < a.shape.size(); ++dim) {
    if (a.offset[dim] >= b.offset[dim] + b.shape[dim] || b.offset[dim] >= a.offset[dim] + a.shape[dim]) return false;
  }
  return true;
}

std::string where(const PieceAt& at) {
  return "rank " + std::to_string(at.rank) + " has " + shape_text(at.piece->shape) + " at " +
         shape_text(at.piece->offset);
}

Status check_piece(const ShardPiece& piece, std::uint32_t rank) {
  const std::string who = piece.key + " of rank " + std::to_string(rank);
  if (piece.offset.size() != piece.global_shape.size() || piece.shape.size() != piece.global_shape.size()) {
    return Error(Errc::invalid_argument, who + ": shape, offset and global_shape have different lengths");
  }
  if (piece.key.size() > kTensorNameBytesMax) {
    return Error(Errc::invalid_argument, "a key of " + std::to_string(piece.key.size()) + " bytes of rank " +
                                             std::to_string(rank) + ", more than a name may have");
  }
  std::uint64_t elements = 1;
  for (std::size_t dim = 0; dim < piece.shape.size(); ++dim) {
    const std::uint64_t whole = piece.global_shape[dim];
    if (piece.offset[dim] > whole || piece.shape[dim] > whole - piece.offset[dim]) {
      return Error(Errc::out_of_range, who + ": " + shape_text(piece.shape) + " at " + shape_text(piece.offset) +
                                           " is not in " + shape_text(piece.global_shape));
    }
    if (whole != 0 && elements > kModelBytesMax / whole) return Error(Errc::out_of_range, who + " is too large");
    elements *= whole;
  }
  return {};
}

Status add_piece(const PieceAt& at, std::map<std::string, TrainerTensor>& tensors) {
  DS_TRY(check_piece(*at.piece, at.rank));
  TrainerTensor& tensor = tensors[at.piece->key];
  for (const PieceAt& other : tensor.pieces) {
    if (other.piece->global_shape != at.piece->global_shape || other.piece->dtype != at.piece->dtype) {
      return Error(Errc::layout_mismatch, at.piece->key + ": rank " + std::to_string(other.rank) + " says " +
                                              std::string(to_string(other.piece->dtype)) + " " +
                                              shape_text(other.piece->global_shape) + ", rank " +
                                              std::to_string(at.rank) + " " + std::string(to_string(at.piece->dtype)) +
                                              " " + shape_text(at.piece->global_shape));
    }
    const bool same = other.piece->offset == at.piece->offset && other.piece->shape == at.piece->shape;
    if (same && other.rank != at.rank) return {};  // a replica
    if (elements_of(at.piece->shape) != 0 && elements_of(other.piece->shape) != 0 && overlap(*other.piece, *at.piece)) {
      return Error(Errc::coverage, at.piece->key + ": " + where(other) + ", and " + where(at) + ": they overlap");
    }
  }
  tensor.pieces.push_back(at);
  tensor.elements += elements_of(at.piece->shape);
  return {};
}

Status check_whole(const std::string& key, const TrainerTensor& tensor) {
  const std::uint64_t whole = elements_of(tensor.first().global_shape);
  if (tensor.elements == whole) return {};
  std::string held;
  for (std::size_t i = 0; i < std::min(tensor.pieces.size(), kPiecesShown); ++i) held += "; " + where(tensor.pieces[i]);
  return Error(Errc::coverage, key + " " + shape_text(tensor.first().global_shape) + ": no rank has " +
                                   std::to_string(whole - tensor.elements) + " of its elements" + held);
}

}  // namespace

Result<std::map<std::string, TrainerTensor>> collect_tensors(std::span<const std::vector<ShardPiece>> shards) {
  std::map<std::string, TrainerTensor> tensors;
  for (std::uint32_t rank = 0; rank < shards.size(); ++rank) {
    for (std::uint32_t i = 0; i < shards[rank].size(); ++i) {
      DS_TRY(add_piece({rank, i, &shards[rank][i]}, tensors));
    }
  }
  for (const auto& [key, tensor] : tensors) DS_TRY(check_whole(key, tensor));
  return tensors;
}

std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string out = "[";
  for (const std::uint64_t size : shape) out += (out.size() == 1 ? "" : ", ") + std::to_string(size);
  return out + "]";
}

}  // namespace deltasync::exporting
