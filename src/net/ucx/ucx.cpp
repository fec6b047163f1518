#include "net/ucx/ucx.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "net/ucx/transports.hpp"

namespace deltasync::net::ucx {
namespace {

constexpr std::size_t kThreadsMax = 4;

/// What the process's channels share, kept for all that come: libucp gives a context's memory back to nobody. Closed
/// when the process ends, before libucp's own end.
class Shared {
 public:
  ~Shared() {
    for (const auto& ucx : made_) {
      if (ucx) ucx->halt();
    }
  }

  Result<std::shared_ptr<Ucx>> get(bool loopback) {
    const std::lock_guard lock(mutex_);
    if (!guard_.same_process()) {
      return Error(Errc::unsupported,
                   "UCX was opened before this process was forked off, which it does not survive: start the process by "
                   "itself (multiprocessing's spawn), or use TCP");
    }
    std::shared_ptr<Ucx>& mine = made_[loopback ? 1 : 0];
    if (mine) return mine;
    DS_ASSIGN(Options options, Options::from_environment(loopback));
    DS_ASSIGN(mine, Ucx::open(std::move(options)));
    return mine;
  }

 private:
  const ForkGuard guard_{};
  std::mutex mutex_;
  std::array<std::shared_ptr<Ucx>, 2> made_;
};

std::string value_of(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

Result<Options> Options::from_environment(bool loopback) {
  Options options;
  options.loopback = loopback;
  if (std::string library = value_of("DELTASYNC_UCX_LIBRARY"); !library.empty()) options.library = std::move(library);
  DS_ASSIGN(options.transports, parse_transports(value_of("DELTASYNC_UCX_TRANSPORTS")));
  return options;
}

Result<std::shared_ptr<Ucx>> Ucx::share(bool loopback) {
  static Shared shared;
  return shared.get(loopback);
}

Result<std::shared_ptr<Ucx>> Ucx::open(Options options) {
  DS_ASSIGN(Library lib, Library::open(options.library));
  std::shared_ptr<Ucx> made(new Ucx(std::move(lib), std::move(options)));
  DS_TRY(made->start());
  log::info("ucx_opened library={} version={}", made->lib_.name, made->lib_.version);
  return made;
}

Status Ucx::start() {
  const KeptSignals kept;
  Config* config = nullptr;
  if (const UcsStatus status = lib_.config_read(nullptr, nullptr, &config); status != kOk) {
    return Error(Errc::invalid_argument, "UCX's configuration (UCX_ variables): " + lib_.words(status));
  }
  // Shared memory that notices a peer's death is off by default, and would be passed over in silence.
  for (const char* name : {"POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING"}) {
    if (value_of((std::string("UCX_") + name).c_str()).empty()) lib_.config_modify(config, name, "y");
  }
  // By default it connects within the first send, which blocks for as long as the network likes, and if the peer is
  // gone by then libucp 1.22 aborts or touches what it has freed: whatever the environment says of it.
  lib_.config_modify(config, "TCP_CONN_NB", "y");
  if (options_.loopback && value_of("UCX_NET_DEVICES").empty()) lib_.config_modify(config, "NET_DEVICES", "lo");
  ContextParams params{};
  params.field_mask = kContextFeatures | kContextWorkersShared;
  params.features = kFeatureAm | kFeatureWakeup;  // no RMA: nobody may name an address of this process
  params.mt_workers_shared = 1;
  const UcsStatus status = lib_.init(OldestVersion::kMajor, OldestVersion::kMinor, &params, config, &context_);
  lib_.config_release(config);
  if (status != kOk) {
    context_ = nullptr;
    return Error(Errc::unsupported,
                 "UCX has no transport that it may use (UCX_TLS, UCX_NET_DEVICES): ucp_init: " + lib_.words(status));
  }
  const std::size_t threads = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kThreadsMax);
  for (std::size_t i = 0; i < threads; ++i) {
    DS_ASSIGN(auto thread, Progress::make("ucx-" + std::to_string(i)));
    threads_.push_back(std::move(thread));
  }
  return {};
}

void Ucx::halt() {
  if (!guard_.same_process()) return;
  for (const auto& thread : threads_) thread->ask_halt();  // they end side by side
  for (const auto& thread : threads_) thread->halt();
}

Ucx::~Ucx() {
  if (!guard_.same_process()) {
    for (auto& thread : threads_) static_cast<void>(thread.release());  // the parent's
    return;
  }
  halt();
  threads_.clear();
  // The context stays, as the library does: a worker that could not be ended may still use it.
}

void Ucx::note(const std::string& transports) {
  const std::lock_guard lock(mutex_);
  if (noted_.insert(transports).second) log::info("ucx_channel transports={}", transports);
}

/// libucp ends the process on an address of a form that it does not know.
Status Ucx::accepts(const Offer& peer) const {
  if (peer.version == lib_.version_number) return {};
  const auto text = [](std::uint32_t version) {
    return std::to_string(version >> 16) + "." + std::to_string(version & 0xFFFF);
  };
  return Error(Errc::unsupported, "UCX: libucp is " + text(lib_.version_number) + " at this end and " +
                                      text(peer.version) +
                                      " at the other: both need the same version (DELTASYNC_UCX_LIBRARY), or pull over "
                                      "TCP, without ucx://");
}

Result<std::shared_ptr<Link>> Ucx::offer() {
  return Link::make(lib_, context_, *threads_[next_++ % threads_.size()], options_.transports);
}

}  // namespace deltasync::net::ucx
