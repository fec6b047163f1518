#include "receiver/bucket/bucket_receiver.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <thread>

#include "base/log.hpp"
#include "net/unix_listener.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::string_view kScheme = "bucket:";
constexpr unsigned kBucketThreadsMax = 16;

unsigned threads_of(unsigned asked) {
  return asked != 0 ? asked : std::clamp(std::thread::hardware_concurrency(), 1u, kBucketThreadsMax);
}

Status check_options(const ReceiverOptions& options) {
  if (options.threads > 256) return Error(Errc::invalid_argument, "at most 256 threads are possible");
  const bool tls = !options.tls.ca.empty() || !options.tls.cert.empty();
  if (options.token.empty() && !tls) return {};
  return Error(Errc::invalid_argument, "a bucket channel has no token and no TLS: its socket is of one user's");
}

std::pair<std::uint64_t, std::uint64_t> inode_of(const std::string& path) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) return {};
  return {found.st_dev, found.st_ino};
}

}  // namespace

std::optional<std::string> bucket_path(std::string_view endpoint) {
  if (!endpoint.starts_with(kScheme)) return std::nullopt;
  return std::string(endpoint.substr(kScheme.size()));
}

// ---- status --------------------------------------------------------------------------------------------------------

void BucketStatus::set(std::optional<Version> held, std::string error) {
  const std::lock_guard lock(mutex_);
  known_.held = std::move(held);
  known_.last_error = std::move(error);
}

void BucketStatus::offered(const Version& version) {
  const std::lock_guard lock(mutex_);
  known_.newest = version;
  heard_ = std::chrono::steady_clock::now();
}

/// Nobody is asked: what was offered last is the newest there is.
Lag BucketStatus::lag(const CallContext& /*until*/) const {
  const std::lock_guard lock(mutex_);
  Lag lag = known_;
  if (!lag.newest) return lag;
  lag.heard_newest = lag.newest;
  lag.heard_s = lag.newest_age_s = seconds_since(heard_);
  const bool current = lag.held && lag.held->id == lag.newest->id;
  if (current) lag.versions = 0;
  if (current) lag.seconds = 0.0;
  return lag;
}

std::string BucketStatus::last_error() const {
  const std::lock_guard lock(mutex_);
  return known_.last_error;
}

// ---- socket --------------------------------------------------------------------------------------------------------

SocketFile::SocketFile(std::string path, UniqueFd fd)
    : path_(std::move(path)), fd_(std::move(fd)), inode_(inode_of(path_)) {}

SocketFile::~SocketFile() {
  if (fd_ && fork_guard_.same_process() && inode_of(path_) == inode_) ::unlink(path_.c_str());
}

Result<SocketFile> SocketFile::listen(const std::string& path) {
  DS_ASSIGN(UniqueFd fd, net::listen_unix(path, {"engine", "another path"}));
  return SocketFile(path, std::move(fd));
}

// ---- receiver ------------------------------------------------------------------------------------------------------

BucketReceiver::BucketReceiver(ReceiverOptions options, SocketFile listener)
    : BoundTarget(std::move(options), pool_),
      pool_(threads_of(options_.threads), "ds-bucket"),
      listener_(std::move(listener)) {}

BucketReceiver::~BucketReceiver() {
  drop_unfinished();
  target_.reset();  // it uses the pool
}

Result<std::unique_ptr<BucketReceiver>> BucketReceiver::connect(ReceiverOptions options, const std::string& path,
                                                                const CallContext& until) {
  DS_TRY(check_options(options));
  DS_ASSIGN(SocketFile listener, SocketFile::listen(path));
  std::unique_ptr<BucketReceiver> made;
  try {
    made.reset(new BucketReceiver(std::move(options), std::move(listener)));
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the receiver's threads: " + e.code().message());
  }
  while (made->layout_ == nullptr) {
    if (until.deadline().passed()) {
      return Error(Errc::timed_out, "no trainer has connected to the buckets at " + path);
    }
    auto heard = made->hear_one(until, until.deadline());
    if (!heard) return std::move(heard).error().with_context("buckets at " + path);
  }
  return made;
}

void BucketReceiver::discard_full() {
  if (open_) target_->discard_full();
  open_ = false;
}

void BucketReceiver::note_standing(const Error* failure) {
  status_->set(current(), failure != nullptr ? failure->to_string() : "");
}

Result<bool> BucketReceiver::is_current(const StagedUpdate& staged, const Want& want, const CallOptions& /*call*/) {
  DS_TRY(check_want(want).with_context("is_current"));
  if (staged_ == nullptr || staged_ != &staged) {
    return Error(Errc::invalid_argument, "is_current: this update was overtaken by a later pull");
  }
  return suits(staged.report().version, want).ok();
}

Result<RepairReport> BucketReceiver::repair(std::span<const std::uint64_t> /*tiles*/, const CallOptions& /*call*/) {
  return Error(Errc::unsupported,
               "repair: a bucket channel keeps no version to fetch tiles from: let the trainer send it again, or "
               "restore() from a shadow");
}

Result<std::unique_ptr<StagedUpdate>> BucketReceiver::pull(const Want& want, const CallOptions& call) {
  DS_TRY(check_pullable());
  DS_TRY(check_want(want).with_context("pull"));
  if (!want.directory.empty()) {
    return Error(Errc::unsupported, "pull: a directory, into a bucket channel's receiver: make one of an agent");
  }
  close_staged();
  const CallContext until(call);
  const OnTarget on_target(*target_, until);
  const auto start = std::chrono::steady_clock::now();
  auto agreed = agree(want, until);
  if (!agreed) {
    const Error why = std::move(agreed).error();
    const bool none_came = why.code() == Errc::timed_out || why.code() == Errc::cancelled;  // which is no failure
    if (!none_came) note_standing(&why);
    return why;
  }
  const std::optional<Version> version = *std::move(agreed);
  Prepared prepared;
  if (!version) {
    prepared.report.version = target_->committed()->version;
    prepared.report.root = target_->committed()->root;
    prepared.report.full_bytes = tiles_.bytes();
    note_standing(nullptr);
    return stage(std::move(prepared));
  }
  const double wait_s = seconds_since(start);
  auto taken = take(*version, until);
  end_version();
  if (!taken) {
    const Error why = std::move(taken).error().with_context("version " + to_string(*version));
    discard_full();
    refuse_all(Error(why.code(), "the engine: " + why.message()));
    note_standing(&why);
    return why;
  }
  taken->report.wait_s = wait_s;
  return stage(std::move(*taken));
}

}  // namespace deltasync::receiver
