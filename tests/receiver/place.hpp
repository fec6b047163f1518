// Where a target under test keeps its versions, as somebody sees it who only looks there.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/target.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"

namespace deltasync::test {

/// Where the target under test keeps its versions.
class Place {
 public:
  virtual ~Place() = default;
  virtual Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) = 0;
  /// What a user of the target sees from outside is this half (null: no version); else what differs.
  virtual std::string outside(const Target& target, const std::vector<std::byte>* half) = 0;
};

/// A kind of target under test.
struct Kind {
  const char* name;
  std::function<std::unique_ptr<Place>()> make;
  bool resolves = false;  ///< single steps come as a pull leaves them: with decoded changes, as far as a budget goes
  bool may_be_missing = false;  ///< then its tests are skipped
  bool slow = false;            ///< what only repeats itself is done less often
};

/// A shadow beside what another place keeps.
class Shadowed final : public Place {
 public:
  explicit Shadowed(std::unique_ptr<Place> live) : live_(std::move(live)) {}
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    DS_ASSIGN(std::unique_ptr<Target> target, live_->make(layout));
    return make_shadowed_target(std::move(target));
  }
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    return live_->outside(target, half);
  }

 private:
  const std::unique_ptr<Place> live_;
};

}  // namespace deltasync::test
