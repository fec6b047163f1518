// A version on its way: chunk by chunk out of the trainers' buckets into the target, each tile verified.
#include <algorithm>
#include <cstring>

#include "base/trace.hpp"
#include "delta/delta.hpp"
#include "format/wire_bucket.hpp"
#include "receiver/bucket/bucket_receiver.hpp"
#include "receiver/bucket/readable.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::uint64_t kTilesPerItem = 16;

/// A tile, and which piece of the chunk has it.
struct Placed {
  std::uint64_t tile;
  const bucket::Piece* piece;
};

}  // namespace

/// Of a tile that the trainer overwrites meanwhile only the copy is looked at: what is verified is what is put.
Result<bool> BucketReceiver::put_tile(const BucketSession& session, unsigned half, const bucket::Piece& piece,
                                      const Tile& tile, std::vector<std::byte>& scratch) {
  const Tensor& tensor = layout_->tensors()[tile.tensor];
  const auto row_bytes = static_cast<std::size_t>(tile.rect.cols * tensor.element_bytes);
  scratch.resize(static_cast<std::size_t>(tile.rect.rows) * row_bytes);
  const std::byte* from = session.half(half).data() + piece.offset + tile.rect.row * tensor.row_bytes() - piece.from +
                          tile.rect.col * tensor.element_bytes;
  for (std::uint64_t r = 0; r < tile.rect.rows; ++r, from += tensor.row_bytes()) {
    std::memcpy(scratch.data() + r * row_bytes, from, row_bytes);
  }
  const TileRows rows{scratch.data(), row_bytes};
  if (digest_of_rows(*layout_, tile, rows) != digests_[tile.index]) return false;
  DS_TRY(target_->put_tile(tile, rows));
  return true;
}

Status BucketReceiver::take_chunk(BucketSession& session, const net::Message& message, Prepared& prepared,
                                  const CallContext& until) {
  DS_ASSIGN(const wire::BucketChunk chunk, wire::BucketChunk::decode(message.payload));
  const trace::Span span("bucket_take", {{"tensors", chunk.parts.size()}});
  DS_ASSIGN(const std::vector<bucket::Piece> pieces, session.incoming().take(chunk, digests_));
  std::vector<Placed> placed;
  for (const bucket::Piece& piece : pieces) {
    for (std::uint64_t t = piece.first_tile; t < piece.first_tile + piece.tiles; ++t) {
      if (tiles_.is_whole() || tiles_.contains(t)) placed.push_back({t, &piece});
    }
  }
  std::vector<std::vector<std::byte>> scratch(pool_.size());
  const auto put_some = [&](std::uint64_t item, unsigned worker) -> Status {
    const std::uint64_t end = std::min<std::uint64_t>((item + 1) * kTilesPerItem, placed.size());
    std::uint64_t bytes = 0;
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      const Tile tile = bucket::tile_in(*layout_, *placed[i].piece, placed[i].tile);
      DS_ASSIGN(const bool right, put_tile(session, chunk.half, *placed[i].piece, tile, scratch[worker]));
      if (!right) {
        return Error(Errc::corrupt, describe_tile(*layout_, tile.index) +
                                        " has not the bytes that the chunk names: "
                                        "the trainer wrote the bucket too early");
      }
      bytes += scratch[worker].size();
    }
    done_ += bytes;
    return {};
  };
  DS_TRY(run_all(pool_, (placed.size() + kTilesPerItem - 1) / kTilesPerItem, until, "taking a bucket", put_some));
  prepared.report.tiles += placed.size();
  return session.answer(message.header.request, until);
}

Status BucketReceiver::take_message(BucketSession& session, Prepared& prepared, const CallContext& until) {
  DS_ASSIGN(const net::Message message, session.receive(until));
  switch (message.type()) {
    case wire::Type::bucket_chunk: return take_chunk(session, message, prepared, until);
    case wire::Type::bucket_finish: {
      DS_ASSIGN(const wire::BucketFinish manifest, wire::BucketFinish::decode(message.payload));
      DS_TRY(session.incoming().finish(manifest, digests_));
      session.finish = message.header.request;
      return {};
    }
    case wire::Type::error: {
      DS_ASSIGN(const wire::ErrorMessage said, wire::ErrorMessage::decode(message.payload));
      return BucketSession::given_up(Error(said.code, said.message));
    }
    default: break;
  }
  return Error(Errc::protocol, wire::describe(message.header) + " came where a bucket_chunk was due");
}

Result<Prepared> BucketReceiver::take(const Version& version, const CallContext& until) {
  const trace::Span span("bucket_version", version.id);
  const auto start = std::chrono::steady_clock::now();
  DS_TRY(target_->begin_full(options_.full_update_policy, until));
  open_ = true;
  digests_.assign(static_cast<std::size_t>(layout_->tile_count()), 0);
  done_ = 0;
  all_ = tiles_.bytes();
  Prepared prepared;
  for (const auto& session : sessions_) {
    prepared.report.metadata_bytes -= session->bytes_received();
    session->incoming().begin();
    session->finish = 0;
    session->stop_on(until.stop());
    DS_TRY(session->answer(session->offer->request, until).with_context(session->name()));
  }
  const auto has_finished = [](const auto& session) { return session->finish != 0; };
  while (!std::all_of(sessions_.begin(), sessions_.end(), has_finished)) {
    std::vector<pollfd> fds;
    for (const auto& session : sessions_) {  // one that has finished, too: it may give up before the others have
      fds.push_back({session->fd(), POLLIN | POLLRDHUP, 0});
      fds.push_back({session->process_fd(), POLLIN, 0});
    }
    DS_TRY(wait_readable(fds, until, "waiting for the trainer's next bucket"));
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      if (fds[2 * i].revents == 0 && fds[2 * i + 1].revents == 0) continue;
      DS_TRY(take_message(*sessions_[i], prepared, until).with_context(sessions_[i]->name()));
    }
  }
  for (const auto& session : sessions_) prepared.report.metadata_bytes += session->bytes_received();
  prepared.state.version = version;
  prepared.state.digests.assign(digests_.size(), 0);
  tiles_.scatter(tiles_.gather(digests_), prepared.state.digests);
  prepared.state.root = tiles_.root(digests_);
  PullReport& report = prepared.report;
  report.mode = PullMode::full;
  report.version = version;
  report.root = prepared.state.root;
  report.full_bytes = tiles_.bytes();
  report.local_bytes = done_;
  report.wire_bytes = report.metadata_bytes;
  report.transfer_s = seconds_since(start);
  // It is whole here, whatever becomes of the trainer now.
  for (const auto& session : sessions_) static_cast<void>(session->answer(session->finish, until));
  return prepared;
}

/// What is offered next comes after it.
void BucketReceiver::end_version() {
  done_ = all_ = 0;
  for (const auto& session : sessions_) {
    session->offer.reset();
    session->stop_on({});
  }
  std::erase_if(sessions_, [](const auto& session) { return session->fd() < 0; });
}

}  // namespace deltasync::receiver
