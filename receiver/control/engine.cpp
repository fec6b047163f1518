#include "deltasync/control.hpp"

#include <utility>

#include "receiver/control/server.hpp"

namespace deltasync {
namespace {

Error no_hook(const char* hook) {
  return {Errc::unsupported, std::string("the engine has no ") + hook};
}

}  // namespace

Status RolloutEngine::hold(const CallOptions&) {
  return no_hook("hold");
}
Status RolloutEngine::release_hold() {
  return no_hook("release_hold");
}
Status RolloutEngine::pause_transfer() {
  return {};
}
Status RolloutEngine::resume_transfer() {
  return {};
}
Status RolloutEngine::release_memory(EngineMemory) {
  return no_hook("release_memory");
}
Status RolloutEngine::restore_memory(EngineMemory) {
  return no_hook("restore_memory");
}

void VersionSpans::computed(const Version& version, std::size_t tokens) {
  if (tokens == 0) return;
  const std::size_t first = spans_.empty() ? 0 : std::get<2>(spans_.back());
  if (spans_.empty() || version.id != last_) {
    spans_.emplace_back(version.label.empty() ? std::to_string(version.id.number) : version.label, first, first);
  }
  last_ = version.id;
  std::get<2>(spans_.back()) += tokens;
}

Result<std::unique_ptr<ControlServer>> ControlServer::start(ControlOptions options, RolloutEngine& engine,
                                                            Receiver& receiver) {
  DS_ASSIGN(auto server, control::start_server(std::move(options), engine, control::weights_of(receiver)));
  return std::unique_ptr<ControlServer>(std::move(server));
}

}  // namespace deltasync
