#include "bench/whole_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "format/safetensors.hpp"
#include "receiver/targets/directory/hf_files.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kFilePieceBytes = 8u << 20;

/// Where a piece of a tensor lies in a half and, counted from the first tensor, in the file.
struct Piece {
  std::uint64_t in_half;
  std::uint64_t in_data;
  std::uint64_t bytes;
};

/// `begins`: of each tensor, in the file.
std::vector<Piece> pieces_of(const Layout& layout, const std::vector<std::uint64_t>& begins) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < layout.tensors().size(); ++i) {
    const Tensor& tensor = layout.tensors()[i];
    for (std::uint64_t at = 0; at < tensor.bytes; at += kFilePieceBytes) {
      pieces.push_back({tensor.offset + at, begins[i] + at, std::min(kFilePieceBytes, tensor.bytes - at)});
    }
  }
  return pieces;
}

}  // namespace

Result<WholeFile> WholeFile::save(const Layout& layout, ByteSpan half, const std::filesystem::path& directory,
                                  ThreadPool& pool) {
  safetensors::HeaderBuilder builder;
  std::vector<std::uint64_t> begins;  // one tensor after the other; a half aligns them
  std::uint64_t data_bytes = 0;
  for (const Tensor& tensor : layout.tensors()) {
    begins.push_back(data_bytes);
    data_bytes += tensor.bytes;
    if (!builder.add(tensor)) return Error(Errc::invalid_argument, "so many tensors fit in no safetensors header");
  }
  const std::vector<std::byte> header = builder.finish();
  std::filesystem::path path = directory / ("deltasync-bench-" + std::to_string(::getpid()) + ".safetensors");
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return file_error("creating", path, errno);
  ::unlink(path.c_str());
  DS_TRY(write_at(fd.get(), 0, header, path));
  const std::vector<Piece> pieces = pieces_of(layout, begins);
  DS_TRY(run_all(pool, pieces.size(), [&](std::uint64_t i, unsigned) {
    const Piece& piece = pieces[i];
    return write_at(fd.get(), header.size() + piece.in_data, half.subspan(piece.in_half, piece.bytes), path);
  }));
  return WholeFile(std::move(fd), std::move(path), header.size() + data_bytes);
}

Status WholeFile::load(const Layout& layout, MutByteSpan half, ThreadPool& pool) const {
  std::vector<std::byte> header(safetensors::kLengthBytes);
  DS_TRY(read_at(fd_.get(), 0, header, path_));
  DS_ASSIGN(const std::uint64_t header_bytes, safetensors::header_bytes(header, bytes_));
  header.resize(header_bytes);
  DS_TRY(read_at(fd_.get(), 0, header, path_));
  DS_ASSIGN(const auto entries, safetensors::parse_header(header, bytes_ - header_bytes));
  if (!std::equal(entries.begin(), entries.end(), layout.tensors().begin(), layout.tensors().end(),
                  [](const safetensors::Entry& entry, const Tensor& tensor) {
                    return entry.name == tensor.spec.name && entry.end - entry.begin == tensor.bytes;
                  })) {
    return Error(Errc::corrupt, path_.string() + " has other tensors than the layout");
  }
  std::vector<std::uint64_t> begins;
  for (const auto& entry : entries) begins.push_back(entry.begin);
  const std::vector<Piece> pieces = pieces_of(layout, begins);
  return run_all(pool, pieces.size(), [&](std::uint64_t i, unsigned) {
    const Piece& piece = pieces[i];
    return read_at(fd_.get(), header_bytes + piece.in_data, half.subspan(piece.in_half, piece.bytes), path_);
  });
}

}  // namespace deltasync::bench
