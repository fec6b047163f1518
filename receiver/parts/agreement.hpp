// Which version a receiver of parts takes: the newest that all members whose tiles it needs can give. One for a pull.
// Pure: what is heard goes in, what to do next comes out. An explorer runs it (tests/receiver/parts).
//
//   asking ──all have answered──▶ pulling one {epoch, number} from all ──all have staged it──▶ agreed
//     ▲                              │
//     └──────── a member has not ────┘
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "deltasync/version.hpp"

namespace deltasync::receiver {

/// What is wanted, and from where on.
struct AgreementWant {
  std::optional<VersionId> held;  ///< committed; nothing: none, or it is to be replaced
  bool newer = false;             ///< than `held`; else that is an answer too
  bool older_epoch = true;        ///< a version of an older epoch than `held` will do
};

class Agreement {
 public:
  enum class Step : std::uint8_t {
    ask,         ///< each member that has_answered() is false of: what is your newest?
    pull,        ///< version() from all, and no other
    up_to_date,  ///< version() is held, and all members have it
    agreed,      ///< all have staged version()
  };

  Agreement(std::size_t members, AgreementWant want) : want_(want), members_(members) {}

  Step step() const noexcept { return step_; }
  const VersionId& version() const noexcept { return version_; }
  bool has_answered(std::size_t member) const noexcept { return members_[member].newest.has_value(); }

  /// The newest version that the member serves.
  void heard(std::size_t member, VersionId newest);
  /// The member has staged this version.
  void staged(std::size_t member, VersionId version);
  /// The member cannot give version() any more (`for_good`), or does not have it yet, or is away: asked again.
  void refused(std::size_t member, bool for_good);

 private:
  struct Member {
    std::optional<VersionId> newest;
    bool staged = false;
  };

  void decide();
  void ask_again(VersionId than);
  bool is_wanted(const VersionId& version) const;

  const AgreementWant want_;
  std::vector<Member> members_;
  std::set<VersionId> gone_;  ///< that some member cannot give any more
  Step step_ = Step::ask;
  VersionId version_;
};

}  // namespace deltasync::receiver
