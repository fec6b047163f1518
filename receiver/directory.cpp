// What a directory of safetensors files has, staged as a full update.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/fd.hpp"
#include "base/label.hpp"
#include "format/hf_files.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::size_t kNamesMax = 8;

/// Fills all of `to`.
Status read_at(int fd, MutByteSpan to, std::uint64_t offset, const std::string& file) {
  while (!to.empty()) {
    const ssize_t got = ::pread(fd, to.data(), to.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Error::from_errno(file, errno);
    if (got == 0) return Error(Errc::corrupt, file + " has become shorter");
    to = to.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return {};
}

/// The weight files, open, with the headers that the model was made of. They are read, not mapped: where another
/// process cuts one off, that is an error and no signal.
class Files {
 public:
  static Result<Files> open(const std::filesystem::path& directory, const Sidecar& sidecar) {
    Files files;
    for (const Sidecar::File& weights : sidecar.weights) {
      const std::string name = (directory / weights.name).string();
      UniqueFd fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
      if (!fd) return Error::from_errno(name, errno);
      std::vector<std::byte> header(weights.bytes.size());
      DS_TRY(read_at(fd.get(), header, 0, name));
      if (header != weights.bytes) return Error(Errc::corrupt, name + " has just been replaced");
      files.files_.emplace_back(std::move(fd), name);
    }
    return files;
  }
  Status read(const HfPlace& place, std::uint64_t offset, MutByteSpan to) const {
    const auto& [fd, name] = files_[place.file];
    return read_at(fd.get(), to, place.offset + offset, name);
  }

 private:
  std::vector<std::pair<UniqueFd, std::string>> files_;
};

std::string text_of(const Tensor& tensor) {
  std::string shape;
  for (const std::uint64_t size : tensor.spec.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  return std::string(to_string(tensor.spec.dtype)) + " [" + shape + "]";
}

/// Names of one kind of difference, some of them.
class Names {
 public:
  explicit Names(const char* kind) : kind_(kind) {}
  void add(const std::string& name) {
    if (count_++ < kNamesMax) text_ += (text_.empty() ? "" : ", ") + name;
  }
  void append_to(std::string& text) const {
    if (count_ == 0) return;
    text += (text.empty() ? "" : "; ") + std::string(kind_) + " " + text_;
    if (count_ > kNamesMax) text += " and " + std::to_string(count_ - kNamesMax) + " more";
  }

 private:
  const char* const kind_;
  std::string text_;
  std::size_t count_ = 0;
};

/// By the layout's tensors, the places of the found ones; layout_mismatch unless they are the same.
Result<std::vector<HfPlace>> match(const Layout& layout, const Layout& found, std::span<const HfPlace> places) {
  Names missing("it lacks"), unexpected("nothing takes"), shapes("of another shape:"), dtypes("of another dtype:");
  std::vector<HfPlace> matched;
  for (const Tensor& tensor : layout.tensors()) {
    const auto index = found.find(tensor.spec.name);
    if (!index) {
      missing.add(tensor.spec.name);
      continue;
    }
    const Tensor& other = found.tensors()[*index];
    const std::string both = tensor.spec.name + " is " + text_of(other) + ", not " + text_of(tensor);
    if (other.spec.shape != tensor.spec.shape) {
      shapes.add(both);
    } else if (other.spec.dtype != tensor.spec.dtype) {
      dtypes.add(both);
    }
    matched.push_back(places[*index]);
  }
  for (const Tensor& tensor : found.tensors()) {
    if (!layout.find(tensor.spec.name)) unexpected.add(tensor.spec.name);
  }
  std::string text;
  for (const Names* names : {&missing, &unexpected, &shapes, &dtypes}) names->append_to(text);
  if (!text.empty()) return Error(Errc::layout_mismatch, "these are not the tensors that are updated here: " + text);
  return matched;
}

/// A tile's rows, one after the other.
Status read_tile(const Layout& layout, const Tile& tile, const Files& files, const HfPlace& place,
                 std::vector<std::byte>& to) {
  const Tensor& tensor = layout.tensors()[tile.tensor];
  const std::uint64_t row_bytes = tile.rect.cols * tensor.element_bytes;
  const std::uint64_t stride = tensor.cols * tensor.element_bytes;
  to.resize(static_cast<std::size_t>(tile.rect.rows * row_bytes));
  const std::uint64_t first = tile.rect.row * stride + tile.rect.col * tensor.element_bytes;
  if (row_bytes == stride) return files.read(place, first, to);
  for (std::uint64_t row = 0; row < tile.rect.rows; ++row) {
    const MutByteSpan part =
        MutByteSpan(to).subspan(static_cast<std::size_t>(row * row_bytes), static_cast<std::size_t>(row_bytes));
    DS_TRY(files.read(place, first + row * stride, part));
  }
  return {};
}

Version version_of(const std::filesystem::path& directory, const Digest128& root) {
  Version version;
  version.id.epoch = kDirectoryEpoch;
  std::memcpy(&version.id.number, root.bytes.data(), sizeof version.id.number);
  version.label = check_label(directory.string()).ok() ? directory.string() : "directory";
  return version;
}

}  // namespace

Result<Prepared> ReceiverImpl::read_directory(const std::filesystem::path& directory, const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  const TargetCapabilities can = target_->capabilities();
  if (can.writes_side_files || can.hand_on != nullptr) {
    return Error(Errc::unsupported, "this kind of target takes versions of a trainer only");
  }
  DS_ASSIGN(const HfModel model, HfModel::open(directory, 1, 0));
  DS_ASSIGN(const std::vector<HfPlace> found, hf_places(*model.layout(), model.sidecar()));
  DS_ASSIGN(const std::vector<HfPlace> places, match(*layout_, *model.layout(), found));
  DS_ASSIGN(const Files files, Files::open(directory, model.sidecar()));
  discard_full();  // of a pull that ended early
  DS_TRY(target_->begin_full(options_.full_update_policy, until));
  partial_.open = true;
  progress_.begin(directory.string(), 0, tiles_.bytes());

  Prepared prepared;
  prepared.state.digests.assign(static_cast<std::size_t>(layout_->tile_count()), 0);
  std::vector<std::vector<std::byte>> scratch(pool_.size());
  const auto read = [&](std::uint64_t rank, unsigned worker) -> Status {
    const Tile tile = tile_of(*layout_, tiles_.nth(rank));
    std::vector<std::byte>& bytes = scratch[worker];
    DS_TRY(read_tile(*layout_, tile, files, places[tile.tensor], bytes));
    const TileRows rows{bytes.data(), bytes.size() / static_cast<std::size_t>(tile.rect.rows)};
    prepared.state.digests[static_cast<std::size_t>(tile.index)] = digest_of_rows(*layout_, tile, rows);
    DS_TRY(target_->put_tile(tile, rows));
    progress_.add(bytes.size());
    return {};
  };
  DS_TRY(run_all(pool_, tiles_.tiles(), until, "reading " + directory.string(), read));
  prepared.state.root = tiles_.root(prepared.state.digests);
  prepared.state.version = version_of(directory, prepared.state.root);
  PullReport& report = prepared.report;
  report.mode = PullMode::full;
  report.version = prepared.state.version;
  report.root = prepared.state.root;
  report.full_bytes = tiles_.bytes();
  report.tiles = tiles_.tiles();
  report.transfer_s = seconds_since(start);
  return prepared;
}

Result<std::unique_ptr<StagedUpdate>> ReceiverImpl::pull_directory(const std::filesystem::path& directory,
                                                                   const CallContext& until) {
  const OnTarget on_target(*target_, until);
  auto prepared = read_directory(directory, until).with_context("directory " + directory.string());
  progress_.end();
  if (prepared) return stage(std::move(*prepared));
  discard_full();
  note_standing(&prepared.error());
  return std::move(prepared).error();
}

}  // namespace deltasync::receiver
