// A data connection whose bytes are to go over UCX.
#include <utility>

#include "agent/serve/pull_conversation.hpp"
#include "base/log.hpp"
#include "format/wire_ucx.hpp"
#include "net/coroutine.hpp"
#include "net/ucx/ucx.hpp"

namespace deltasync::agent {

boost::asio::awaitable<Status> PullConversation::on_open_ucx(Request& request) {
  DS_CO_ASSIGN(wire::OpenUcx peer, wire::OpenUcx::decode(request.payload));
  const auto& ucx = context_.options.ucx;
  if (!ucx) {
    co_return co_await refuse(
        request,
        Error(Errc::unsupported, "this agent has no UCX: start it with --ucx, or pull over TCP, without ucx://"));
  }
  net::ucx::Offer theirs{peer.id, peer.version, std::move(peer.address)};
  if (auto fits = ucx->accepts(theirs); !fits) co_return co_await refuse(request, std::move(fits).error());
  if (over_ucx_) co_return Error(Errc::protocol, "open_ucx, and the connection's bytes go over UCX already");
  const Deadline deadline = Deadline::after(limits_.handshake);
  auto held = context_.ucx_room.take(PullContext::kUcxBytes);
  if (!held) {
    co_return co_await refuse(
        request,
        Error(Errc::no_space, "busy: as many connections go over UCX here as may: pull over TCP, without ucx://"));
  }
  ucx_held_ = *std::move(held);
  const auto make = [&ucx] { return ucx->offer(); };
  auto link = co_await context_.ucx_setup->run(make, deadline);
  if (!link) co_return co_await refuse(request, std::move(link).error());
  wire::UcxOpened answer{{(*link)->offer().id, (*link)->offer().version, (*link)->offer().address}};
  DS_CO_TRY(co_await stream_.write(request.header.request, answer, limits_.progress));
  over_ucx_ = true;
  auto channel = ucx->channel(stream_.fd(), *std::move(link), std::move(theirs));
  DS_CO_TRY((co_await stream_.secure(std::move(channel), deadline)).with_context("UCX"));
  log::debug("ucx_channel connection={} peer={} name=\"{}\" transports={}", connection_, address_, name_,
             stream_.transports());
  co_return Status();
}

}  // namespace deltasync::agent
