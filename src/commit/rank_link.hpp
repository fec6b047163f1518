// A rank's connection to its coordinator: joins when it has to, then asks. Used by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "commit/commit.hpp"
#include "net/blocking.hpp"
#include "net/endpoint.hpp"
#include "net/tls.hpp"

namespace deltasync::commit {

class RankLink {
 public:
  /// `tls` is null for none.
  RankLink(const ParticipantOptions& options, net::Endpoint where, std::shared_ptr<net::Tls> tls = nullptr)
      : ranks_(options.ranks),
        token_(options.token),
        name_(options.name),
        where_(std::move(where)),
        tls_(std::move(tls)) {}

  /// The order that answers the report; to a process that a later one has replaced, as Coordinator::exchange. After an
  /// error it is closed, and the next call joins again.
  Result<Order> exchange(const Report& report, Deadline deadline, const std::stop_token& stop);

 private:
  Status join(const Report& report, const CallContext& until);
  Result<Order> ask(const Report& report, Deadline deadline);

  const std::uint32_t ranks_;
  const std::string token_;
  const std::string name_;
  const net::Endpoint where_;
  const std::shared_ptr<net::Tls> tls_;
  net::MessageSocket socket_;
  std::uint64_t incarnation_ = 0;  ///< that joined
  std::uint64_t latest_ = 0;       ///< process of this rank that the coordinator knew when it joined
  std::uint64_t log_ = 0;          ///< the coordinator's
  std::uint64_t request_ = 0;
};

}  // namespace deltasync::commit
