// A receiver of a model whose parts several trainer nodes hold (deltasync/part.hpp): an ordinary receiver for each of
// them, and one target, which commits what all of them have brought of one version, or nothing.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "receiver/bound_target.hpp"
#include "receiver/parts/agreement.hpp"
#include "receiver/parts/part_target.hpp"
#include "receiver/receiver_impl.hpp"

namespace deltasync::receiver {

/// "HOST:PORT,HOST:PORT": neither is empty.
std::vector<std::string> split_endpoints(std::string_view list);

/// Of the members whose tiles are asked for.
class PartsStatus final : public ReceiverStatus {
 public:
  struct Member {
    std::string name;  ///< as messages have it
    std::shared_ptr<const ReceiverStatus> status;
  };
  void set(std::vector<Member> members) {
    const std::lock_guard lock(mutex_);
    members_ = std::move(members);
  }
  /// That of the part which is furthest behind, or cannot be asked.
  Lag lag(const CallContext& until) const override;
  std::optional<Unserved> unserved() const override;
  std::string last_error() const override;

 private:
  std::vector<Member> members() const {
    const std::lock_guard lock(mutex_);
    return members_;
  }

  mutable std::mutex mutex_;
  std::vector<Member> members_;  // protected by mutex_
};

class PartsReceiver final : public BoundTarget {
 public:
  /// `first` is connected to one of the members, at the options' endpoint.
  static Result<std::unique_ptr<PartsReceiver>> connect(std::unique_ptr<ReceiverImpl> first, ReceiverOptions options,
                                                        const Tuning& tuning, const CallContext& until);
  ~PartsReceiver() override;

  using BoundTarget::bind;
  Status bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) override;
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions& call = {}) override;
  Result<bool> is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call = {}) override;
  Lag lag(const CallOptions& call = {}) const override { return status_->lag(call); }
  std::shared_ptr<const ReceiverStatus> status() const override { return status_; }
  void note_served(const Status& served) override;
  std::pair<std::uint64_t, std::uint64_t> progress() const override;
  using Receiver::repair;
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions& call = {}) override;

 private:
  struct Member {
    Part::Member at;
    std::unique_ptr<PartMap> map;  ///< null: not connected yet
    /// Bound again when other tiles are asked from it. Null: not connected yet.
    std::unique_ptr<ReceiverImpl> receiver;
    PartTarget* target = nullptr;            ///< bound there; null: nothing is asked from it
    bool replaceable = false;                ///< others have all that is asked from it
    std::uint64_t epoch = 0;                 ///< of the trainer that is known to have the members that there are here
    std::unique_ptr<StagedUpdate> staged{};  ///< what it has brought in this pull
    Digest128 staged_root{};
    std::optional<Error> away{};  ///< why it is left out
    std::chrono::steady_clock::time_point tried{};
  };

  PartsReceiver(ReceiverOptions options, const Tuning& tuning);

  // members (parts_members.cpp)
  Status connect_member(Member& member, std::size_t number, const CallContext& until);
  Status take_member(Member& member, std::size_t number, std::unique_ptr<ReceiverImpl> receiver);
  Result<Part> part_of(std::size_t number, const Sidecar& sidecar, const Layout& layout) const;
  Status connect_missing(const CallContext& until);
  Result<std::vector<std::vector<wire::TileRange>>> divide_tiles(const TileSet& wanted) const;
  Status share_out();
  /// It brings another version instead.
  static void unstage(Member& member);
  /// Members that do not answer are left out where others have their tiles, until they do.
  Status look_at_members(const CallContext& until);
  void leave_out(Member& member, const Error& why);
  void note_replaceable();
  std::string describe(const Member& member) const;
  Error about(const Member& member, Error error) const;

  // a pull (parts_pull.cpp)
  Result<Prepared> run(const Want& want, const CallContext& until);
  Result<Prepared> run_once(const Want& want, bool full, const CallContext& until);
  Result<Version> agree(const Want& want, bool full, const CallContext& until);
  Result<Version> agree_on_named(const Want& want, const CallContext& until);
  Result<Version> ask_one(Member& member, const Want& want, const CallContext& until) const;
  Result<std::vector<Version>> ask(const std::vector<Member*>& whom, Want want, const std::optional<Deadline>& wait_by,
                                   const CallContext& until);
  Status fetch(const std::vector<Member*>& whom, const VersionId& version, const Want& want, const CallContext& until,
               std::vector<std::optional<Error>>& refusals);
  Status note_refusals(const std::vector<Member*>& whom, const std::vector<std::optional<Error>>& refusals,
                       const std::optional<Deadline>& wait_by, const CallContext& until);
  Status look_at_epoch(const Member& member, const Version& served, const TargetState* held);
  Result<Prepared> merge(bool full);
  Status scrub(const CallContext& until);
  std::vector<Member*> needed();

  void discard_full() override;
  void full_is_committed() override;
  void note_standing(const Error* failure) override;
  Status target_bound(const CallContext& until) override;

  const Tuning tuning_;
  ThreadPool pool_;
  const std::shared_ptr<PartsStatus> status_ = std::make_shared<PartsStatus>();
  Part part_;  ///< of the first; what is the same of all is used
  std::vector<Member> members_;
  mutable std::mutex bringing_mutex_;
  std::vector<const ReceiverImpl*> bringing_;  ///< who is asked for tiles; protected by bringing_mutex_
  std::unique_ptr<JointUpdate> joint_;
  std::uint64_t scrubs_ = 0;
  bool members_changed_ = false;  ///< since a pull has begun to ask them
  std::optional<Error> last_;     ///< in a pull: the last refusal of a member
};

}  // namespace deltasync::receiver
