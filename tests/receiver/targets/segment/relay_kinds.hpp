// The kind of target whose versions are in the segment of another agent: its place is what that agent serves.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "receiver/targets/segment/relay_target.hpp"
#include "tests/receiver/place.hpp"
#include "tests/support/temp_dir.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {

class NodesSegment final : public Place {
 public:
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    DS_ASSIGN(auto writer, Writer::attach(layout, make_sidecar(*layout), writer_options(dir_.path()), soon()));
    relay::RelayTarget::Options options{std::chrono::minutes(1), MiniAgent::socket_in(dir_.path()), {}};
    return std::unique_ptr<Target>(new relay::RelayTarget(layout, std::move(writer), std::move(options)));
  }
  /// What is served stays when a version is given up: it was whole.
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    if (half == nullptr) return {};
    const VersionId version = target.committed()->version.id;
    if (!eventually([&] { return agent_.served() == version; })) return "the agent serves another version";
    return agent_.served_bytes() == *half ? "" : "the agent serves other bytes";
  }

 private:
  TempDir dir_;
  MiniAgent agent_{dir_.path()};
};

inline std::vector<Kind> kinds() {
  return {Kind{"Segment", [] { return std::make_unique<NodesSegment>(); }}};
}

}  // namespace deltasync::test
