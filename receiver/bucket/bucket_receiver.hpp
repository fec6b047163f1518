// A receiver that takes versions from trainer processes of its host out of their buckets (src/bucket), where no agent
// and no double buffer is: it listens, they connect. All else is as with an agent: the target, staging, commit,
// attestation.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "base/fork_guard.hpp"
#include "receiver/bound_target.hpp"
#include "receiver/bucket/bucket_session.hpp"

namespace deltasync::receiver {

/// The socket's path, if the endpoint is "bucket:PATH".
std::optional<std::string> bucket_path(std::string_view endpoint);

class BucketStatus final : public ReceiverStatus {
 public:
  void set(std::optional<Version> held, std::string error);
  void offered(const Version& version);
  Lag lag(const CallContext& until) const override;
  std::optional<Unserved> unserved() const override { return std::nullopt; }
  std::string last_error() const override;

 private:
  mutable std::mutex mutex_;
  Lag known_;  // protected by mutex_, as the next
  std::chrono::steady_clock::time_point heard_;
};

/// A socket's file, removed at the end if it is still this one; not by a forked child.
class SocketFile {
 public:
  static Result<SocketFile> listen(const std::string& path);
  SocketFile(SocketFile&&) noexcept = default;
  ~SocketFile();
  int fd() const noexcept { return fd_.get(); }

 private:
  SocketFile(std::string path, UniqueFd fd);
  std::string path_;
  UniqueFd fd_;
  std::pair<std::uint64_t, std::uint64_t> inode_{};
  ForkGuard fork_guard_;
};

class BucketReceiver final : public BoundTarget {
 public:
  /// Listens, and waits for the first trainer process, which brings the layout.
  static Result<std::unique_ptr<BucketReceiver>> connect(ReceiverOptions options, const std::string& path,
                                                         const CallContext& until);
  ~BucketReceiver() override;

  using BoundTarget::bind;
  /// The next version that all ranks offer. An offer of another one than is wanted is refused, so that its trainer gets
  /// to know.
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions& call = {}) override;
  Result<bool> is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call = {}) override;
  Lag lag(const CallOptions& call = {}) const override { return status_->lag(call); }
  std::shared_ptr<const ReceiverStatus> status() const override { return status_; }
  void note_served(const Status& /*served*/) override {}
  std::pair<std::uint64_t, std::uint64_t> progress() const override { return {done_, all_}; }
  using Receiver::repair;
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions& call = {}) override;

 private:
  using Sessions = std::vector<std::unique_ptr<BucketSession>>;

  BucketReceiver(ReceiverOptions options, SocketFile listener);

  // before a version
  /// Waits for something to hear on the listener or a session, not beyond `patience`, and hears it. False: nothing
  /// came.
  Result<bool> hear_one(const CallContext& until, Deadline patience);
  Status accept();
  void greet(UniqueFd connection, const CallContext& until);
  Status admit(BucketSession::Greeting greeting, const CallContext& until);
  Status hear_offer(BucketSession& session, const CallContext& until);
  /// Whether there were such.
  bool drop_gone();
  /// Nothing: it is committed already, and no other is offered.
  Result<std::optional<Version>> agree(const Want& want, const CallContext& until);
  Status check_shares() const;
  Status check_side_files() const;
  /// Why an offered version is not the wanted one; gone, if none of those to come is.
  Status suits(const Version& version, const Want& want) const;
  void refuse_all(const Error& why);

  // a version
  Result<Prepared> take(const Version& version, const CallContext& until);
  Status take_message(BucketSession& session, Prepared& prepared, const CallContext& until);
  Status take_chunk(BucketSession& session, const net::Message& message, Prepared& prepared, const CallContext& until);
  Result<bool> put_tile(const BucketSession& session, unsigned half, const bucket::Piece& piece, const Tile& tile,
                        std::vector<std::byte>& scratch);
  void end_version();

  void discard_full() override;
  void full_is_committed() override { open_ = false; }
  bool fetches() const override { return false; }
  void note_standing(const Error* failure) override;

  ThreadPool pool_;
  SocketFile listener_;
  const std::shared_ptr<BucketStatus> status_ = std::make_shared<BucketStatus>();
  std::vector<UniqueFd> strangers_;  ///< that have not said a word, oldest first
  Sessions sessions_;
  std::uint32_t ranks_ = 0;             ///< of the trainer, by the first hello; 0: none has come
  bool open_ = false;                   ///< a full update, in the target
  std::vector<std::uint64_t> digests_;  ///< of the version that comes: all tiles
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> all_{0};
};

}  // namespace deltasync::receiver
