#include "receiver/targets/segment/early_fill.hpp"

#include <array>
#include <utility>

#include "base/log.hpp"
#include "delta/delta.hpp"
#include "format/arrival_file.hpp"
#include "receiver/targets/target_checks.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {

Status EarlyFill::begin(const Version& version, const Digest128& root, std::span<const std::uint64_t> digests,
                        Deadline deadline) {
  const std::lock_guard lock(mutex_);
  end_locked();
  const std::vector<std::byte> file = encode_arriving(layout_, version, root, digests);
  const std::array<ByteSpan, 1> pieces{file};
  DS_TRY(hand_over_delta(writer_, pieces));  // first: the agent looks for it when the fill begins
  if (Status begun = writer_.begin(version, deadline); !begun) {
    withdraw_delta(writer_);
    return begun;
  }
  version_ = version;
  root_ = root;
  digests_.assign(digests.begin(), digests.end());
  written_.assign(digests.size(), 0);
  open_ = true;
  return {};
}

bool EarlyFill::is_open() const {
  const std::lock_guard lock(mutex_);
  return open_;
}

bool EarlyFill::is_of(const Version& version, const Digest128& root) const {
  const std::lock_guard lock(mutex_);
  return open_ && version_ == version && root_ == root;
}

void EarlyFill::write(ByteSpan from, std::span<const std::uint64_t> tiles) {
  ByteSpan half;
  {
    const std::lock_guard lock(mutex_);
    if (!open_) return;
    if (Status wrote = write_locked(from, tiles); !wrote) {
      log::warn("early_fill_ended version=\"{}\" error=\"{}\" effect=\"it is served once it is whole\"",
                to_string(version_), wrote.error().to_string());
      return end_locked();
    }
    half = writer_.filling();
  }
  if (Status right = look_at(half, tiles); !right) {
    const std::lock_guard lock(mutex_);
    if (!open_) return;
    log::warn("early_fill_ended version=\"{}\" error=\"{}\" effect=\"it is served once it is whole\"",
              to_string(version_), right.error().to_string());
    end_locked();
  }
}

Status EarlyFill::write_locked(ByteSpan from, std::span<const std::uint64_t> tiles) {
  std::vector<SliceSource> slices;
  slices.reserve(tiles.size());
  for (const std::uint64_t index : tiles) {
    if (std::exchange(written_[static_cast<std::size_t>(index)], std::uint8_t{1}) != 0) continue;
    const Tile tile = tile_of(layout_, index);
    const Tensor& tensor = layout_.tensors()[tile.tensor];
    Source source;
    source.data =
        from.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
    source.row_stride_bytes = static_cast<std::size_t>(tensor.row_bytes());
    slices.push_back({{tile.tensor, tile.rect}, source});
  }
  return slices.empty() ? Status() : writer_.write(slices);
}

/// Each thread its own tiles, while they are in its cache.
Status EarlyFill::look_at(ByteSpan half, std::span<const std::uint64_t> tiles) const {
  for (const std::uint64_t tile : tiles) {
    if (delta::tile_digest(layout_, half, tile) == digests_[static_cast<std::size_t>(tile)]) continue;
    return Error(Errc::corrupt, describe_tile(layout_, tile) + " differs from its digest where it was written");
  }
  return {};
}

void EarlyFill::take_over() noexcept {
  const std::lock_guard lock(mutex_);
  open_ = false;
}

void EarlyFill::end() noexcept {
  const std::lock_guard lock(mutex_);
  end_locked();
}

void EarlyFill::end_locked() noexcept {
  if (!std::exchange(open_, false)) return;
  writer_.abort();
  withdraw_delta(writer_);
}

}  // namespace deltasync::relay
