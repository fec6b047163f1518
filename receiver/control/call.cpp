#include "receiver/control/call.hpp"

namespace deltasync::control {

std::string_view to_string(EngineMemory memory) noexcept {
  switch (memory) {
    case EngineMemory::weights: return "weights";
    case EngineMemory::kv_cache: return "kv_cache";
    case EngineMemory::cpu_cache: return "cpu_cache";
    case EngineMemory::cuda_graph: return "cuda_graph";
  }
  return "";
}

std::string to_string(MemorySet memory) {
  std::string text;
  for (const EngineMemory one :
       {EngineMemory::weights, EngineMemory::kv_cache, EngineMemory::cpu_cache, EngineMemory::cuda_graph}) {
    if (memory.has(one)) text += (text.empty() ? "" : " and ") + std::string(to_string(one));
  }
  return text;
}

std::string_view to_string(Call::Kind kind) noexcept {
  switch (kind) {
    case Call::Kind::pause: return "pause";
    case Call::Kind::resume: return "resume";
    case Call::Kind::sleep: return "sleep";
    case Call::Kind::wake: return "wake";
    case Call::Kind::update: return "update";
    case Call::Kind::reset_caches: return "reset_caches";
    case Call::Kind::check: return "check";
  }
  return "";
}

std::string_view to_string(Step::Kind kind) noexcept {
  switch (kind) {
    case Step::Kind::none: return "none";
    case Step::Kind::stop_admission: return "stop_admission";
    case Step::Kind::resume_admission: return "resume_admission";
    case Step::Kind::abort: return "abort";
    case Step::Kind::wait_idle: return "wait_idle";
    case Step::Kind::hold: return "hold";
    case Step::Kind::release_hold: return "release_hold";
    case Step::Kind::reset_caches: return "reset_caches";
    case Step::Kind::pause_transfer: return "pause_transfer";
    case Step::Kind::resume_transfer: return "resume_transfer";
    case Step::Kind::release: return "release_memory";
    case Step::Kind::restore: return "restore_memory";
    case Step::Kind::fill: return "fill";
    case Step::Kind::stage: return "stage";
    case Step::Kind::commit: return "commit";
  }
  return "";
}

}  // namespace deltasync::control
