// A receiver without an agent, which brings nothing.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "deltasync/receiver.hpp"

namespace deltasync::test {

class IdleReceiver : public Receiver {
 public:
  const LayoutPtr& layout() const override { return layout_; }
  const Sidecar& sidecar() const override { return sidecar_; }
  Status bind(std::unique_ptr<Target> /*none*/, const std::vector<Slice>& /*all*/,
              const CallOptions& /*none*/) override {
    return {};
  }
  Target* target() override { return nullptr; }
  const std::vector<Slice>& slices() const override { return slices_; }
  FullUpdatePolicy full_update_policy() const override { return FullUpdatePolicy::stage; }
  bool supports_rollback() const override { return true; }
  std::optional<Version> current() const override { return std::nullopt; }
  Lag lag(const CallOptions& /*none*/) const override { return {}; }
  std::pair<std::uint64_t, std::uint64_t> progress() const override { return {}; }
  Result<bool> is_current(const StagedUpdate&, const Want&, const CallOptions&) override { return true; }
  Result<std::unique_ptr<StagedUpdate>> pull(const Want&, const CallOptions&) override { return nothing(); }
  Result<std::vector<TileMismatch>> attest(const CallOptions&) override { return nothing(); }
  Result<RepairReport> repair(std::span<const std::uint64_t>, const CallOptions&) override { return nothing(); }
  Status release(const CallOptions&) override { return nothing(); }
  Result<RepairReport> restore(const CallOptions&) override { return nothing(); }

 private:
  static Error nothing() { return {Errc::unsupported, "there is no agent"}; }

  LayoutPtr layout_;
  std::vector<Slice> slices_;
  Sidecar sidecar_;
};

}  // namespace deltasync::test
