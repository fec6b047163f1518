// Following an agent: every newer version, over its restarts and changes of the layout.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "deltasync/receiver.hpp"

namespace CLI {
class App;
}

namespace deltasync::cli {

struct Follower {
  std::uint64_t count = 0;   ///< versions, then it ends; 0: until it is stopped
  double deadline_s = 3600;  ///< for one version, the wait for it included
  /// A receiver with a target, when there is none yet and after a change of the layout.
  std::function<Result<std::unique_ptr<Receiver>>(const CallContext& until)> connect;
  /// The next version: waited for, pulled, committed.
  std::function<Result<PullReport>(Receiver& receiver, const CallContext& until)> take;
  /// A failure of this ends the following, but no_space: output is lost then, and versions go on.
  std::function<Status(const PullReport& report)> tell;
};

/// Until `count` versions are there (no_space: the last one's output is lost), a stop (cancelled), or a failure that no
/// retry helps. Others are tried again, after pauses of 0.2 to 10 s, and logged when they begin or change. What the
/// user has to fix (a wrong token, a file that is no certificate, a slice that is not there, no permission) ends it
/// only as long as it was never connected and bound. From then on the process ignores SIGHUP.
Status follow(const Follower& follower, const std::stop_token& stop);

/// `--on-older-epoch`: ReceiverOptions::on_older_epoch.
void add_on_older_epoch(CLI::App& app, OlderEpoch& policy);

Deadline after_seconds(double seconds);

}  // namespace deltasync::cli
