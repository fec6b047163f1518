#include "agent/core.hpp"

#include <utility>

#include "base/log.hpp"

namespace deltasync::agent {

AgentCore::AgentCore(const CoreOptions& options, shm::AgentLock lock, std::shared_ptr<Reclaimer> reclaimer,
                     AdoptedSegments adopted)
    : options_(options),
      copy_room_(options.copy_bytes_max),
      peer_room_(options.peer_bytes_max),
      packers_(options.pack_threads),
      reclaimer_(std::move(reclaimer)),
      files_(std::move(lock), reclaimer_),
      versions_(options_, std::move(adopted), bell_, reclaimer_, metrics_),
      damage_(versions_, bell_, reclaimer_, metrics_),
      arrival_(versions_, leases_, origin_),
      delta_arrival_(versions_),
      publisher_(options_, versions_, leases_, damage_, origin_, arrival_, delta_arrival_, bell_, metrics_),
      deltas_(options_, versions_, reclaimer_, metrics_),
      revoker_(options_.lease_grace, versions_, leases_, metrics_),
      open_plans_(plan_parts()),
      plans_(plan_parts(), open_plans_),
      subsets_(peer_room_),
      trainer_hooks_(options_, versions_, open_plans_, bell_, reclaimer_, metrics_, origin_, arrival_, delta_arrival_) {
  if (!versions_.generations().empty()) origin_.was(files_.source(), options_.relay_grace);
}

Result<std::unique_ptr<AgentCore>> AgentCore::start(const CoreOptions& options) {
  DS_TRY(shm::check_segment_name(options.name));
  DS_ASSIGN(auto lock, shm::AgentLock::acquire(options.shm_dir, options.name));
  auto reclaimer = std::make_shared<Reclaimer>(options.before_unmap);
  auto adopted = adopt_segments(options, *reclaimer);
  if (!adopted) {
    lock.remove_on_release();
    return std::move(adopted).error();
  }
  std::unique_ptr<AgentCore> core(new AgentCore(options, std::move(lock), std::move(reclaimer), *std::move(adopted)));
  core->start_threads();
  return core;
}

PlanParts AgentCore::plan_parts() {
  return {options_, versions_, deltas_, leases_, revoker_, reclaimer_, peer_room_, packers_.threads(), metrics_};
}

void AgentCore::start_threads() {
  reclaimer_thread_ = std::thread([reclaimer = reclaimer_] {
    set_thread_name("reclaimer");
    reclaimer->work();
  });
  versions_.start();
  deltas_.start();
  publisher_.start();
  damage_.start(options_.scrub);
}

AgentCore::~AgentCore() {
  stop();
  files_.keep_source(origin_.source());
}

void AgentCore::stop() {
  trainer_hooks_.stop();
  deltas_.ask_to_stop();
  publisher_.ask_to_stop();
  open_plans_.close();
  damage_.stop();
  packers_.stop();
  deltas_.stop();
  publisher_.stop();
  versions_.stop();
  reclaimer_->close();
  if (reclaimer_thread_.joinable()) reclaimer_thread_.join();
  if (versions_.generations().empty()) files_.remove_lock_at_end();  // there is nothing for a next agent of the name
}

std::chrono::milliseconds AgentCore::run_maintenance() {
  open_plans_.run_maintenance();
  const bool retiring = revoker_.run_maintenance();
  files_.look(versions_.generations());
  files_.keep_source(origin_.source());
  origin_.look();
  if (const auto news = origin_.news(); news && *news) {
    log::warn(origin_lines_,
              "cut_off why=\"{}\" effect=\"what is served grows old; receivers ask other agents, if they "
              "know any\"",
              (*news)->why);
  } else if (news) {
    log::info("no_longer_cut_off");
  }
  return std::chrono::milliseconds(retiring ? 5 : 50);
}

}  // namespace deltasync::agent
